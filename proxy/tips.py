"""The tips of the conversations of training rollouts: a bounded cache over the store.

Nothing here is the truth. Tips that another process made, or that were forgotten here, are read from
the store's frames; those of a rollout whose frames are gone are gone with them.
"""

from collections import OrderedDict

import msgspec
from msgspec import Raw

from capture.completion import read_stream
from capture.errors import UpstreamError
from capture.types import RawCall
from proxy.continuity import Conversation, Tip, read, tip_of
from proxy.dialects import chat
from proxy.dialects.chat import Said
from proxy.refusal import Refused
from proxy.replay import BROKEN
from proxy.storage import Storage

CALLS_READ_MAX = 64  # newest calls of a rollout that are looked at
_ENCODE = msgspec.json.Encoder().encode
_CALL_BYTES = 500  # about what a call weighs beside its ids


class _Known:
    """What is known of one rollout."""

    __slots__ = ("calls", "latest", "size", "tips")

    def __init__(self) -> None:
        self.latest: Conversation | None = None  # of the calls that were answered
        self.tips: dict[bytes, Tip] = {}
        self.calls: set[str] = set()
        self.size = 0


class Tips:
    """Tips by rollout and digest; whole rollouts are forgotten, least recently used first."""

    def __init__(self, storage: Storage, bytes_max: int) -> None:
        self._storage = storage
        self._bytes_max = bytes_max
        self._bytes = 0
        self._rollouts: OrderedDict[str, _Known] = OrderedDict()

    def latest(self, rollout_id: str) -> Conversation | None:
        """The conversation that was answered last, as the next one is likely to begin with it."""
        known = self._rollouts.get(rollout_id)
        return None if known is None else known.latest

    def find(self, rollout_id: str, conversation: Conversation) -> tuple[int, Tip] | None:
        """The last answer in it that a known call gave, and that call's tip."""
        known = self._rollouts.get(rollout_id)
        if known is None:
            return None
        for place, digest in reversed(conversation.answers.items()):
            if (tip := known.tips.get(digest)) is not None:
                return place, tip
        return None

    def thoughts(self, rollout_id: str, conversation: Conversation) -> list[tuple[int, Raw]]:
        """Every answer in it that held reasoning, as it was given."""
        known = self._rollouts.get(rollout_id) or _Known()
        found = [(place, known.tips.get(digest)) for place, digest in conversation.answers.items()]
        return [(place, tip.thought) for place, tip in found if tip is not None and tip.thought is not None]

    def remember(self, rollout_id: str, call_id: str, conversation: Conversation, said: Said) -> None:
        """A call was answered: its tip can be gone on from."""
        found = self.find(rollout_id, conversation)
        tip = tip_of(call_id, said, None if found is None else found[1])
        latest = self.latest(rollout_id)
        grown = conversation.size - (0 if latest is None else latest.size)
        size = 0 if tip is None else len(tip.rest) + len(tip.thought or b"")
        self._note(rollout_id, call_id, size + grown)
        known = self._rollouts[rollout_id]
        known.latest = conversation
        if tip is not None and (digest := conversation.then(said.message)) is not None:
            known.tips[digest] = tip

    def leave_out(self, rollout_id: str, call_id: str) -> None:
        """A call cannot be gone on from."""
        self._note(rollout_id, call_id, 0)

    def _note(self, rollout_id: str, call_id: str, size: int) -> None:
        """A call is known, with so many bytes of its own."""
        known = self._rollouts.setdefault(rollout_id, _Known())
        self._rollouts.move_to_end(rollout_id)
        known.calls.add(call_id)
        known.size += _CALL_BYTES + size
        self._bytes += _CALL_BYTES + size
        while self._bytes > self._bytes_max and len(self._rollouts) > 1:
            self._bytes -= self._rollouts.popitem(last=False)[1].size

    async def read(self, rollout_id: str) -> bool:
        """Learn from the store what other processes did; whether there was anything new. `StoreError`."""
        known = self._rollouts.get(rollout_id)
        calls = frozenset() if known is None else frozenset(known.calls)
        method = self._storage.store.raw_calls
        raws = await self._storage.call(method, rollout_id, but=calls, limit=CALLS_READ_MAX)
        for raw in raws:
            self._take(raw)
        return bool(raws)

    def _take(self, raw: RawCall) -> None:
        try:
            conversation = read(chat.parse(raw.request))
            said = said_of(raw.response, raw.stream) if raw.status == 200 else None
        except Refused:
            conversation = said = None
        if conversation is not None and said is not None and raw.policy is not None and not raw.redacted:
            self.remember(raw.rollout_id, raw.id, conversation, said)
        else:
            self.leave_out(raw.rollout_id, raw.id)


def said_of(body: bytes, stream: bool) -> Said | None:
    """What an engine's stored answer says; None if it is not one whole completion of one choice."""
    try:
        if not stream:
            return chat.Whole(body).said()
        found = read_stream(body)
    except (UpstreamError, *BROKEN):
        return None
    if found.choices != 1 or found.finish_reason is None or found.message is None:
        return None
    return Said(_ENCODE(found.prompt_ids), _ENCODE(found.token_ids), found.message)
