"""How a conversation goes on from the very ids that were sampled. Pure.

Text that was sampled need not become the same tokens again: clients write it down anew, and where a
model spelled a word in its own way a tokenizer spells it in another. So the next prompt is put together
from the ids of the call that it goes on from, its *tip* (prompt and sampled), and a *bridge*: what the
chat template writes after that reply for everything new. The bridge is proven by two renderings: the
request up to the reply's end must be the beginning of the whole request, so that what follows depends
on nothing before it. Whatever cannot be proven stays as the agent sent it, for a reason of `OUTCOMES`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw

from proxy.dialects.chat import FALSE, NULL, TRUE, Fields, Said
from proxy.replay import BROKEN, DIGEST_BYTES, Budget, Message, form, is_sane, message_of
from proxy.template import Ids, Template

FAITHFUL: Final = "faithful"
EXACT: Final = "exact"
DRIFTED: Final = "drifted"
UNKNOWN: Final = "unknown"
UNENDED: Final = "unended"
REWRITTEN: Final = "rewritten"
STRIPPED: Final = "stripped"
TOO_LONG: Final = "too_long"
UNSUPPORTED: Final = "unsupported"
UNRENDERED: Final = "unrendered"
IGNORED: Final = "ignored"

OUTCOMES: Final[dict[str, str]] = {
    FAITHFUL: "Its own rendering goes on from the sampled ids.",
    EXACT: "Its own rendering would not; the prompt was put together from the sampled ids and a bridge.",
    DRIFTED: "Its own rendering does not, and nobody was looking: `auto` looks once it has seen this.",
    UNKNOWN: "No call of its rollout said what it goes on from: another history, system prompt or tools.",
    UNENDED: "The reply does not end in a token that the template ends replies with (it was cut off).",
    REWRITTEN: "The template writes earlier messages in another way once new ones follow.",
    STRIPPED: "The template leaves out reasoning that was sampled.",
    TOO_LONG: "The sampled ids and the bridge are longer than the engine's context.",
    UNSUPPORTED: "The engine does not render, does not take ids, or its template rewrites earlier turns.",
    UNRENDERED: "The engine did not render the request, or refused the ids.",
    IGNORED: "The engine used other ids than those that it was given.",
}
"""What became of a training call that goes on from an answer -> sentence."""

# Beside the messages: all that chat templates are given.
PROMPT_FIELDS: Final[tuple[str, ...]] = (
    "tools",
    "tool_choice",
    "response_format",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
)
_THINKING_ENDS = "</think>"


class Unproven(Exception):
    """There is no bridge; `reason` is one of `OUTCOMES`."""

    def __init__(self, reason: str) -> None:
        super().__init__(OUTCOMES[reason])
        self.reason = reason


class Onward(msgspec.Struct, kw_only=True):
    """How one call goes on from an earlier one, as far as is known by now."""

    tip: "Tip | None"
    outcome: str | None = None  # of `OUTCOMES`; None: nobody looked, its answer will tell
    ids: list[int] | None = None  # the prompt that the engine is given


# -- what was said -------------------------------------------------------------------------------


class _Said(Message, frozen=True):
    tool_call_id: Any = None
    name: Any = None


class Conversation:
    """A request's messages, and for each of the assistant's the digest of everything said up to it.

    `answers` is place -> digest. Replies are compared as replays are recognised (`proxy.replay`),
    everything else as it stands, tools and template arguments included.
    """

    __slots__ = ("_context", "_count", "_hash", "_json", "answers")

    def __init__(self, json: bytes, messages: Sequence[_Said], context: bytes) -> None:
        self._json = json
        self._context = context
        self._hash = hashlib.blake2b(context, digest_size=DIGEST_BYTES)
        self._count = 0
        self.answers: dict[int, bytes] = {}
        self._add(messages)

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return len(self._json) + len(self._context)

    def added(self, json: bytes, context: bytes) -> bytes | None:
        """What another request's messages add to these, as JSON; None unless they begin with these, byte
        for byte, in the same context."""
        stem = len(self._json) - 1
        if (
            context != self._context
            or json[stem : stem + 1] != b","
            or not json.startswith(self._json[:stem])
        ):
            return None
        return b"[" + json[stem + 1 :]

    def longer(self, json: bytes, messages: Sequence[_Said]) -> "Conversation":
        """The conversation that goes on from this one with these messages, and is `json` as a whole."""
        found = Conversation(json, (), b"")
        found._context, found._count = self._context, self._count
        found._hash, found.answers = self._hash.copy(), dict(self.answers)
        found._add(messages)
        return found

    def _add(self, messages: Sequence[_Said]) -> None:
        budget = Budget()
        for place, message in enumerate(messages, self._count):
            if message.role == "assistant":
                self._hash.update(form(message, budget))
                self.answers[place] = self._hash.digest()
            else:
                said = (message.role, _text(message.content), message.tool_call_id, message.name)
                self._hash.update(_encode(said))
        self._count += len(messages)

    @property
    def last(self) -> int:
        """The place of the last answer, -1 if there is none."""
        return next(reversed(self.answers), -1)

    def then(self, answer: Mapping[str, Any]) -> bytes | None:
        """The digest at this answer in whatever goes on from it; None if it could not be read there."""
        hash = self._hash.copy()
        try:
            hash.update(form(message_of(answer), Budget()))
        except BROKEN:
            return None
        return hash.digest()

    def messages(self) -> list[Raw]:
        """The messages themselves, each in the agent's own bytes."""
        return _RAWS.decode(self._json)


def read(fields: Fields, before: Conversation | None = None) -> Conversation | None:
    """The conversation of a request as the agent sent it; where it begins with the one `before`, only what it
    adds is read.

    None where it cannot be gone on with: messages that are not those of a chat, pictures or sound in
    them, a last message that the model is to finish.
    """
    if fields.get("continue_final_message", FALSE) not in (FALSE, NULL):
        return None
    if fields.get("add_generation_prompt", TRUE) not in (TRUE, NULL):
        return None
    json = bytes(fields["messages"])
    if not is_sane(json):
        return None
    context = b"\0".join(bytes(fields[name]) if name in fields else b"" for name in PROMPT_FIELDS)
    try:
        added = None if before is None else before.added(json, context)
        messages = _MESSAGES.decode(json if added is None else added)
        if not all(_is_text(message.content) for message in messages):
            return None
        if before is None or added is None:
            return Conversation(json, messages, context)
        return before.longer(json, messages)
    except BROKEN:
        return None


def _is_text(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return content is None or isinstance(content, str)


def _text(content: Any) -> str:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


# -- what was sampled ----------------------------------------------------------------------------


class Tip(msgspec.Struct, frozen=True, eq=False):
    """A call that can be gone on from: the ids of its prompt and of what was sampled."""

    call_id: str
    base: "Tip | None"  # these ids begin with that tip's
    rest: bytes  # the further ones, each with a comma behind it
    thought: Raw | None = None  # the reply as the agent got it, where it holds reasoning

    @property
    def ids(self) -> bytes:
        """All of them, each with a comma behind it: as engines write them, so that none need be decoded."""
        parts = []
        tip: Tip | None = self
        while tip is not None:
            parts.append(tip.rest)
            tip = tip.base
        return b"".join(reversed(parts))


def tip_of(call_id: str, said: Said, base: Tip | None) -> Tip | None:
    """The tip that a completed call leaves; None if its ids are not known.

    `base` is the tip that its messages go on from, whether or not its ids do.
    """
    prompt, sampled = listed(said.prompt_ids), listed(said.token_ids)
    if not prompt or not sampled:
        return None
    ids = prompt + sampled
    before = b"" if base is None else base.ids
    if not ids.startswith(before):
        base, before = None, b""
    return Tip(call_id, base, ids[len(before) :], _thought(said.message))


def listed(ids: bytes) -> bytes:
    """A JSON list of ids as tips keep them; empty if it is none, or has none."""
    bare = ids.strip()[1:-1].replace(b" ", b"")
    return bare + b"," if bare and not bare.translate(None, _IN_IDS) else b""


def read_ids(ids: bytes) -> list[int]:
    """The ids that `listed` gave."""
    return _IDS.decode(b"[" + ids[:-1] + b"]")


def _thought(reply: Mapping[str, Any]) -> Raw | None:
    content = reply.get("content")
    inline = isinstance(content, str) and _THINKING_ENDS in content
    thinks = inline or reply.get("reasoning") or reply.get("reasoning_content")
    return Raw(msgspec.json.encode(reply)) if thinks else None


def without_thought(reply: Raw) -> Raw:
    """A reply as the agent got it, without its reasoning."""
    fields: dict[str, Any] = msgspec.json.decode(reply)
    fields = {name: value for name, value in fields.items() if name not in ("reasoning", "reasoning_content")}
    if isinstance(fields.get("content"), str):
        fields["content"] = fields["content"].rpartition(_THINKING_ENDS)[2].lstrip()
    return Raw(msgspec.json.encode(fields))


# -- the proof -----------------------------------------------------------------------------------


def bridge(template: Template, tip: Ids, upto: Ids, whole: Ids, length_max: int | None) -> list[int]:
    """The tokens between a tip and the next reply; the new prompt is `tip` and these.

    `upto` is the request rendered up to and including the tip's reply, without generation prompt;
    `whole` is all of it. The cut lies behind the reply's last token, which model and template agree
    on, so both sides of it are those of an ordinary call. Raises `Unproven`.
    """
    cut = len(upto) - len(template.tail)
    ended = tip[-1] in template.ends and list(upto[cut - 1 :]) == [tip[-1], *template.tail]
    if cut < 1 or not ended:
        raise Unproven(UNENDED)
    if list(whole[:cut]) != list(upto[:cut]) or len(whole) <= cut:
        raise Unproven(REWRITTEN)
    if length_max is not None and len(tip) + len(whole) - cut >= length_max:
        raise Unproven(TOO_LONG)
    return list(whole[cut:])


_IDS = msgspec.json.Decoder(list[int])
_IN_IDS = b"0123456789,"
_MESSAGES = msgspec.json.Decoder(list[_Said])
_RAWS = msgspec.json.Decoder(list[Raw])
_encode = msgspec.msgpack.Encoder().encode
