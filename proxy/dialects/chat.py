"""Chat completions: what is read of a request, what is taken out of an answer. Pure.

Bodies are decoded one level at a time into `dict[str, msgspec.Raw]`, so that everything the proxy
does not touch goes through byte for byte.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from capture.completion import read_deltas, tidy
from capture.errors import UpstreamError
from proxy.refusal import Refused
from proxy.replay import Message, message_of
from proxy.sse import DONE, payload

Fields = dict[str, Raw]

_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_OBJECTS = msgspec.json.Decoder(list[dict[str, Raw]])
_TEXT = msgspec.json.Decoder(str)
_ENCODE = msgspec.json.Encoder().encode

TRUE, FALSE, NULL = Raw(b"true"), Raw(b"false"), Raw(b"null")


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a call, as the upstream counted them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


_USAGE = msgspec.json.Decoder(Usage)
_MESSAGE = msgspec.json.Decoder(Message)
_ANY_OBJECT = msgspec.json.Decoder(dict[str, Any])


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent itself asked for: the rest is taken out of the answer again."""

    model: str
    stream: bool = False
    choices: int = 1
    ids: bool = False
    logprobs: bool = False
    usage: bool = False  # as a chunk of the stream


def parse(body: bytes) -> Fields:
    """The request, one level deep. `Refused` 400 for anything that is not one JSON object in UTF-8."""
    try:
        if not body.isascii():
            body.decode()
        return _OBJECT.decode(body)
    except RecursionError:
        raise Refused(400, "invalid_json", "The body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise Refused(400, "invalid_json", f"The body is not valid UTF-8: {error.reason}.") from None
    except msgspec.DecodeError as error:
        raise Refused(400, "invalid_json", f"The body is not a valid JSON object: {error}") from None


def asked(fields: Mapping[str, Raw]) -> Asked:
    """Read what decides how the call is served. `Refused` 400 names the field that is wrong."""
    for required in ("model", "messages"):
        if required not in fields:
            raise Refused(400, "missing_field", f"The field {required!r} is required.", param=required)
    if not bytes(fields["messages"]).startswith(b"["):
        raise Refused(400, "invalid_type", "'messages' must be a list.", param="messages")
    options = _maybe_object(fields.get("stream_options"), "stream_options")
    return Asked(
        model=_text(fields["model"], "model"),
        stream=_flag(fields, "stream"),
        choices=_count(fields),
        ids=_flag(fields, "return_token_ids"),
        logprobs=_flag(fields, "logprobs"),
        usage=_flag(options, "include_usage"),
    )


def ask_for_tokens(fields: Fields, want: Asked) -> None:
    """Set what exact capture needs of a vLLM server: ids, logprobs and, in a stream, usage."""
    fields["return_token_ids"] = TRUE
    fields["logprobs"] = TRUE
    if want.stream:
        ask_for_usage(fields)


def ask_for_usage(fields: Fields) -> None:
    """Have a stream say at its end how many tokens it was."""
    options = _maybe_object(fields.get("stream_options"), "stream_options")
    options["include_usage"] = TRUE
    fields["stream_options"] = Raw(_ENCODE(options))


def encode(fields: Fields) -> bytes:
    """The request again; nested bytes are those of the agent."""
    return _ENCODE(fields)


def quote(text: str) -> Raw:
    """`text` as a JSON string."""
    return Raw(_ENCODE(text))


class Said(msgspec.Struct, frozen=True):
    """One whole completion of one choice, as its engine reported it: ids as JSON lists, the reply."""

    prompt_ids: bytes
    token_ids: bytes
    message: dict[str, Any]


class Whole:
    """A whole answer, decoded once, one level at a time. `UpstreamError` if it is not a chat completion."""

    __slots__ = ("_body", "_choices", "_fields", "_prompt_ids", "_token_ids", "usage")

    def __init__(self, body: bytes) -> None:
        self._body = body
        try:
            self._fields = _OBJECT.decode(body)
            self._choices = _OBJECTS.decode(self._fields["choices"])
            self.usage = _usage(self._fields.get("usage"))
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError, RecursionError) as error:
            raise UpstreamError(f"the upstream's answer is not a chat completion: {error!r}") from None
        self._prompt_ids = self._fields.get("prompt_token_ids", NULL)
        self._token_ids = self._choices[0].get("token_ids", NULL) if self._choices else NULL

    def strip(self, want: Asked, alias: str | None) -> bytes:
        """The answer without what only capture asked for, `model` set to `alias`; None leaves it as it is."""
        if alias is None:
            return self._body
        self._fields["model"] = quote(alias)
        if not want.ids:
            self._fields.pop("prompt_token_ids", None)
        if not (want.ids and want.logprobs):
            for choice in self._choices:
                _strip_choice(choice, want)
            self._fields["choices"] = Raw(_ENCODE(self._choices))
        return _ENCODE(self._fields)

    def answers(self) -> list[Message]:
        """The assistant's message of every choice; none if one is no message."""
        try:
            raws = [choice["message"] for choice in self._choices if choice.get("message", NULL) != NULL]
            return [_MESSAGE.decode(raw) for raw in raws]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return []

    def said(self) -> Said | None:
        """What a later call may go on from; None if there is not one whole completion with its ids."""
        if len(self._choices) != 1 or self._choices[0].get("finish_reason", NULL) == NULL:
            return None
        try:
            message = tidy(_ANY_OBJECT.decode(self._choices[0]["message"]))
        except (msgspec.MsgspecError, ValueError, RecursionError, KeyError):
            return None
        return _said(self._prompt_ids, [self._token_ids], message)


def strip(body: bytes, want: Asked, alias: str | None) -> tuple[bytes, Usage]:
    """A whole answer without what only capture asked for, and its usage. `UpstreamError`."""
    answer = Whole(body)
    return answer.strip(want, alias), answer.usage


class Stream:
    """Decides, chunk by chunk, what of a streamed answer may be sent now and what must wait.

    Everything from the first chunk that completes the last open choice is held: it is `held` until
    the call is durable. `complete` is True once every choice has finished; `error` is set by an
    error chunk of the upstream.
    """

    def __init__(
        self, want: Asked, alias: str | None, *, gather: bool = False, strips_usage: bool = False
    ) -> None:
        self._want = want
        self._alias = None if alias is None else quote(alias)
        self._verbatim = alias is None and not strips_usage
        self._open = set(range(want.choices))
        self._held: list[bytes] = []
        self._deltas: dict[bytes, list[bytes]] | None = {} if gather else None
        self._prompt_ids = NULL
        self._token_ids: list[Raw] = []
        self.done = False
        self.error: str | None = None
        self.usage = Usage()

    @property
    def complete(self) -> bool:
        """Every choice has its finish_reason."""
        return not self._open

    @property
    def held(self) -> bytes:
        """What was held back, ready to send, with the terminal chunk."""
        return b"".join([*self._held, b"data: ", DONE, b"\n\n"])

    def answers(self) -> list[Message]:
        """The assistant's message of every choice so far, if this was to `gather` them."""
        try:
            found = [read_deltas(deltas) for deltas in (self._deltas or {}).values()]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return []
        return [message_of(message) for message in found if message is not None]

    def said(self) -> Said | None:
        """What a later call may go on from, if this was to `gather` it; None as in `Whole.said`."""
        if self._open or self._want.choices != 1 or not self._deltas:
            return None
        try:
            message = read_deltas(self._deltas.get(b"0", []))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        return None if message is None else _said(self._prompt_ids, self._token_ids, message)

    def take_all(self, chunks: list[bytes]) -> tuple[bytes, UpstreamError | None]:
        """Bytes to send now of several chunks, up to the first that breaks the stream; that error."""
        out: list[bytes] = []
        try:
            for chunk in chunks:
                out.append(self.take(chunk))
                if self.error is not None:
                    raise UpstreamError(f"the upstream broke off: {self.error[:500]}")
        except UpstreamError as error:
            return b"".join(out), error
        return b"".join(out), None

    def take(self, chunk: bytes) -> bytes:
        """Bytes to send now (maybe none). `UpstreamError` for what is not a chunk of a completion."""
        data = payload(chunk)
        if data == DONE:
            self.done = True
            return b""
        if data is None:
            out = chunk + b"\n\n"
        else:
            try:
                out = self._strip(chunk, data)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
                raise UpstreamError(f"a chunk of the stream is not a completion: {error!r}") from None
        if self._open:
            return out
        if out:
            self._held.append(out)
        return b""

    def _strip(self, chunk: bytes, data: bytes) -> bytes:
        fields = _OBJECT.decode(data)
        if "choices" not in fields:
            self.error = data.decode(errors="replace")
            return b""
        choices = _OBJECTS.decode(fields["choices"])
        self._note(fields, choices)
        if self._verbatim:
            return chunk + b"\n\n"
        if self._alias is not None:
            fields["model"] = self._alias
        if not self._want.ids:
            fields.pop("prompt_token_ids", None)
        if not self._want.usage:
            fields.pop("usage", None)
            if not choices:
                return b""
        if not (self._want.ids and self._want.logprobs):
            for choice in choices:
                _strip_choice(choice, self._want)
            if choices and all(map(_is_empty, choices)):
                return b""
            fields["choices"] = Raw(_ENCODE(choices))
        return b"data: " + _ENCODE(fields) + b"\n\n"

    def _note(self, fields: Fields, choices: list[Fields]) -> None:
        if (usage := fields.get("usage")) is not None and usage != NULL:
            self.usage = _usage(usage)
        if "prompt_token_ids" in fields:
            self._prompt_ids = fields["prompt_token_ids"]
        for choice in choices:
            if self._deltas is not None and (delta := choice.get("delta")) is not None:
                self._deltas.setdefault(bytes(choice.get("index", b"0")), []).append(bytes(delta))
                self._token_ids.append(choice.get("token_ids", NULL))
            if choice.get("finish_reason", NULL) != NULL:
                self._open.discard(int(bytes(choice.get("index", Raw(b"0")))))


def _strip_choice(choice: Fields, want: Asked) -> None:
    if not want.ids:
        choice.pop("token_ids", None)
    if not want.logprobs and "logprobs" in choice:
        choice["logprobs"] = NULL


def _is_empty(choice: Fields) -> bool:
    """A chunk that exists only because ids were asked for: no delta, no end."""
    return (
        bytes(choice.get("delta", b"{}")) == b"{}"
        and choice.get("finish_reason", NULL) == NULL
        and "token_ids" not in choice
        and choice.get("logprobs", NULL) == NULL
    )


def _said(prompt_ids: Raw, token_ids: Sequence[Raw], message: dict[str, Any]) -> Said | None:
    sampled = [bytes(raw)[1:-1] for raw in token_ids if raw not in (NULL, b"[]")]
    if prompt_ids in (NULL, b"[]") or not sampled:
        return None
    return Said(bytes(prompt_ids), b"[" + b",".join(sampled) + b"]", message)


def _usage(raw: Raw | None) -> Usage:
    return Usage() if raw is None or raw == NULL else _USAGE.decode(raw)


def _text(raw: Raw, name: str) -> str:
    try:
        return _TEXT.decode(raw)
    except msgspec.DecodeError:
        raise Refused(400, "invalid_type", f"{name!r} must be a string.", param=name) from None


def _flag(fields: Mapping[str, Raw], name: str) -> bool:
    raw = fields.get(name, FALSE)
    if raw == TRUE:
        return True
    if raw in (FALSE, NULL):
        return False
    raise Refused(400, "invalid_type", f"{name!r} must be true or false.", param=name)


def _count(fields: Mapping[str, Raw]) -> int:
    raw = bytes(fields.get("n", NULL))
    if raw == b"null":
        return 1
    if not raw.isdigit() or len(raw) > 4 or int(raw) < 1:
        raise Refused(400, "invalid_type", "'n' must be a positive integer.", param="n")
    return int(raw)


def _maybe_object(raw: Raw | None, name: str) -> Fields:
    if raw is None or raw == NULL:
        return {}
    try:
        return _OBJECT.decode(raw)
    except msgspec.DecodeError:
        raise Refused(400, "invalid_type", f"{name!r} must be an object.", param=name) from None
