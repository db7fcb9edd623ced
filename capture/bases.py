"""Which earlier call a new one is stored as a difference to: the one that shares the longest prefix.

A content that a later one begins with is not tried any more: whoever shares a prefix with it shares it
with the later one too. So what is kept of a rollout is the end of each of its conversations.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from capture.store import ParentContent
from capture.tokens import packed, shared_tokens
from capture.types import ModelCall

_ENDS_MAX = 32  # conversations of one rollout, those last gone on with
Base = tuple[str, int, int]  # call id, shared tokens, shared messages


class _Known:
    """One earlier content, as bytes: prefixes compare at memory speed, and JSON 1 is not true."""

    __slots__ = ("call_id", "messages", "size", "tokens")

    def __init__(self, call_id: str, token_ids: list[int], messages: list[bytes]) -> None:
        self.call_id = call_id
        self.tokens = packed(token_ids)
        self.messages = messages
        self.size = len(self.tokens) + sum(map(len, messages))

    def covers(self, other: "_Known") -> bool:
        """Whether this one begins with the other: its tokens, or its messages where it has no tokens."""
        if other.tokens:
            return self.tokens.startswith(other.tokens)
        return self.messages[: len(other.messages)] == other.messages


class Bases:
    """Recent contents of recent rollouts, bounded in bytes; what is forgotten is read again."""

    def __init__(self, read: Callable[[str], list[ParentContent]], bytes_max: int) -> None:
        self._read = read
        self._bytes_max = bytes_max
        self._bytes = 0
        self._rollouts: OrderedDict[str, deque[_Known]] = OrderedDict()

    def find(self, call: ModelCall) -> Base | None:
        """The best base among the calls of its rollout that were stored or asked about before.

        The call is remembered, as it is about to be stored. Should that fail, nothing is lost: the
        store keeps a call whole if it does not know its base.
        """
        known = self._known(call.rollout_id)
        messages = call.messages if call.response is None else [*call.messages, call.response]
        encoded = [msgspec.json.encode(message) for message in messages]
        new = _Known(call.id, call.prompt_ids + call.sampled_ids, encoded)
        best = _best(new, [one for one in known if one.call_id != call.id])
        self._remember(known, new)
        self._evict()
        return best

    def _known(self, rollout_id: str) -> deque[_Known]:
        known = self._rollouts.get(rollout_id)
        if known is None:
            known = self._rollouts[rollout_id] = deque()
            for parent in self._read(rollout_id):
                encoded = [msgspec.json.encode(message) for message in parent.messages]
                self._remember(known, _Known(parent.call_id, parent.token_ids, encoded))
        self._rollouts.move_to_end(rollout_id)
        return known

    def _remember(self, known: deque[_Known], new: _Known) -> None:
        for old in [one for one in known if new.covers(one)]:
            known.remove(old)
            self._bytes -= old.size
        known.append(new)
        self._bytes += new.size
        if len(known) > _ENDS_MAX:
            self._bytes -= known.popleft().size

    def _evict(self) -> None:
        while self._bytes > self._bytes_max and len(self._rollouts) > 1:
            _, oldest = self._rollouts.popitem(last=False)
            self._bytes -= sum(one.size for one in oldest)


def _best(new: _Known, known: list[_Known]) -> Base | None:
    """The newest of those that share most, first in tokens, then in messages."""
    best: Base | None = None
    most = (0, 0)
    for one in reversed(known):
        tokens = shared_tokens(new.tokens, one.tokens, most[0])
        if tokens < most[0]:
            continue
        messages = _shared_messages(new.messages, one.messages)
        if (tokens, messages) > most:
            most = (tokens, messages)
            best = (one.call_id, tokens, messages)
    return best


def _shared_messages(new: list[bytes], old: list[bytes]) -> int:
    count = 0
    for one, other in zip(new, old, strict=False):
        if one != other:
            break
        count += 1
    return count
