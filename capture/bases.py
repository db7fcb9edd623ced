"""Which earlier call a new one is stored as a difference to: the one that has most in common with it.

A content that a later one begins with is not tried any more: whoever shares a prefix with it shares it
with the later one too. So what is kept of a rollout is the end of each of its conversations.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from capture.store import ContentBase, ParentContent
from capture.tokens import packed, shared_tokens
from capture.types import ModelCall

_ENDS_MAX = 32  # conversations of one rollout, those last gone on with
_ENDS_BYTES_MAX = 2 * 1024 * 1024  # of their contents; the last two are kept whatever their size


class _End:
    """One earlier content; as bytes, which compare at memory speed, and in which 1 is not true."""

    __slots__ = ("content", "said", "size")

    def __init__(self, content: ParentContent) -> None:
        self.content = content
        self.said = frozenset(content.messages)
        self.size = len(content.tokens) + sum(map(len, content.messages))

    def covers(self, other: "_End") -> bool:
        """Whether this one begins with the other: its tokens, or its messages where it has no tokens."""
        if other.content.tokens:
            return self.content.tokens.startswith(other.content.tokens)
        return self.content.messages[: len(other.content.messages)] == other.content.messages

    def common(self, other: "_End") -> int:
        """Bytes of the tokens that both begin with, and of the messages that are in both."""
        tokens = 4 * shared_tokens(self.content.tokens, other.content.tokens)
        return tokens + sum(map(len, self.said & other.said))


class Bases:
    """Recent contents of recent rollouts, bounded in bytes; what is forgotten is read again."""

    def __init__(self, read: Callable[[str], list[ParentContent]], bytes_max: int) -> None:
        self._read = read
        self._bytes_max = bytes_max
        self._bytes = 0
        self._rollouts: OrderedDict[str, deque[_End]] = OrderedDict()

    def find(self, call: ModelCall) -> ContentBase | None:
        """The best base among the calls of its rollout that were stored or asked about before.

        The call is remembered, as it is about to be stored. Should that fail, `forget`: nothing is lost
        without, as the store keeps a call whole if it does not know its base, but much is stored twice.
        """
        ends = self._ends(call.rollout_id)
        messages = call.messages if call.response is None else [*call.messages, call.response]
        encoded = [msgspec.json.encode(message) for message in messages]
        new = _End(ParentContent(call.id, packed(call.prompt_ids + call.sampled_ids), encoded))
        # Of equal ones the newest; one that has nothing in common does no harm.
        able = [one for one in reversed(ends) if one.content.call_id != call.id]
        best = max(able, key=new.common, default=None)
        self._remember(ends, new)
        self._evict()
        return None if best is None else _base(new.content, best.content)

    def forget(self) -> None:
        """Everything, when what was to be stored may not have been."""
        self._rollouts.clear()
        self._bytes = 0

    def _ends(self, rollout_id: str) -> deque[_End]:
        ends = self._rollouts.get(rollout_id)
        if ends is None:
            ends = self._rollouts[rollout_id] = deque()
            for parent in self._read(rollout_id):
                self._remember(ends, _End(parent))
        self._rollouts.move_to_end(rollout_id)
        return ends

    def _remember(self, ends: deque[_End], new: _End) -> None:
        for old in [one for one in ends if new.covers(one)]:
            ends.remove(old)
            self._bytes -= old.size
        ends.append(new)
        self._bytes += new.size
        kept = sum(one.size for one in ends)
        while len(ends) > _ENDS_MAX or (len(ends) > 2 and kept > _ENDS_BYTES_MAX):
            oldest = ends.popleft()
            self._bytes -= oldest.size
            kept -= oldest.size

    def _evict(self) -> None:
        while self._bytes > self._bytes_max and len(self._rollouts) > 1:
            _, oldest = self._rollouts.popitem(last=False)
            self._bytes -= sum(one.size for one in oldest)


def _base(new: ParentContent, old: ParentContent) -> ContentBase:
    return ContentBase(
        old, shared_tokens(new.tokens, old.tokens), _shared_messages(new.messages, old.messages)
    )


def _shared_messages(new: list[bytes], old: list[bytes]) -> int:
    count = 0
    for one, other in zip(new, old, strict=False):
        if one != other:
            break
        count += 1
    return count
