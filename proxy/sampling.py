"""What the proxy sets in a request of a training rollout, and what it takes out. Pure.

A call is trainable only if the learner can recompute the distribution it was sampled from,
softmax(logits / T). What is not known to leave it alone (`capture.parameters`) is removed, and recorded
in `changed`: request key -> what was sent upstream instead, None for a key that was left out. The
request as the agent sent it is stored beside it.
"""

from typing import Any

import msgspec
from msgspec import Raw

from capture.parameters import FORWARDED
from capture.reasons import GRAMMAR
from proxy.dialects.chat import FALSE, NULL, Fields
from proxy.refusal import Refused
from proxy.settings import Sampling


class _Format(msgspec.Struct):
    type: str


_FORMAT = msgspec.json.Decoder(_Format)
_OBJECTS = msgspec.json.Decoder(list[dict[str, Raw]])
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_ENCODE = msgspec.json.Encoder().encode
_AUTO = Raw(b'"auto"')
_NONE = Raw(b'"none"')

Changed = dict[str, Any]


def shape(fields: Fields, sampling: Sampling, max_model_len: int | None) -> Changed:
    """Rewrite a training request in place so that its sampling is softmax(logits / T); what changed.

    `max_model_len` is the engine's: a cap above it would make the engine refuse the request.
    `Refused` 400 for n > 1: which of the answers the agent follows could not be known.
    """
    if fields.get("n", NULL) not in (NULL, Raw(b"1")):
        raise Refused(400, "n_not_supported", "A training rollout takes n = 1 only.", param="n")
    changed: Changed = {}
    for name in [name for name in fields if name not in FORWARDED]:
        del fields[name]
        changed[name] = None
    if sampling.grammar == "strip":
        _strip_grammar(fields, changed)
    if _free_choice(fields):
        _strip_strict(fields, changed)
    _set_temperature(fields, sampling.temperature, changed)
    cap = sampling.max_tokens if max_model_len is None else min(sampling.max_tokens, max_model_len)
    _cap_tokens(fields, cap, changed)
    return changed


def untrainable(fields: Fields) -> str | None:
    """Why a shaped request's call cannot be trained, if that is known beforehand."""
    if fields.get("tool_choice", _AUTO) not in (_AUTO, _NONE, NULL):
        return GRAMMAR
    if fields.get("structured_outputs", NULL) != NULL:
        return GRAMMAR
    return None if _is_free_text(fields.get("response_format", NULL)) else GRAMMAR


def _is_free_text(response_format: Raw) -> bool:
    """Whether a response format masks nothing."""
    if response_format == NULL:
        return True
    try:
        return _FORMAT.decode(response_format).type == "text"
    except msgspec.DecodeError:
        return False


def _free_choice(fields: Fields) -> bool:
    """Tools with tool_choice auto (or unsaid): no grammar unless strictness asks for one."""
    return "tools" in fields and fields.get("tool_choice", _AUTO) in (_AUTO, NULL)


def _strip_grammar(fields: Fields, changed: Changed) -> None:
    for name in ("response_format", "structured_outputs"):
        if fields.get(name, NULL) != NULL:
            del fields[name]
            changed[name] = None
    if fields.get("tool_choice", _AUTO) not in (_AUTO, _NONE, NULL):
        fields["tool_choice"] = _AUTO
        changed["tool_choice"] = "auto"


def _strip_strict(fields: Fields, changed: Changed) -> None:
    """vLLM turns `strict` and `parallel_tool_calls: false` into a mask on the sampled tokens."""
    if fields.get("parallel_tool_calls") == FALSE:
        del fields["parallel_tool_calls"]
        changed["parallel_tool_calls"] = None
    if b'"strict"' not in bytes(fields["tools"]):
        return
    try:
        tools = _OBJECTS.decode(fields["tools"])
        stripped = False
        for tool in tools:
            function = _OBJECT.decode(tool.get("function", Raw(b"{}")))
            if function.pop("strict", None) is not None:
                tool["function"] = Raw(_ENCODE(function))
                stripped = True
    except msgspec.DecodeError:
        raise Refused(400, "invalid_type", "'tools' must be a list of objects.", param="tools") from None
    if stripped:
        fields["tools"] = Raw(_ENCODE(tools))
        changed["tools"] = msgspec.json.decode(fields["tools"])


def _set_temperature(fields: Fields, temperature: float, changed: Changed) -> None:
    raw = Raw(_ENCODE(temperature))
    if not _same_number(fields.get("temperature"), temperature):
        changed["temperature"] = temperature
    fields["temperature"] = raw


def _cap_tokens(fields: Fields, cap: int, changed: Changed) -> None:
    """Cap whichever of the two names the agent used; vLLM lets `max_completion_tokens` win."""
    used = [name for name in ("max_completion_tokens", "max_tokens") if fields.get(name, NULL) != NULL]
    for name in used or ["max_tokens"]:
        raw = bytes(fields.get(name, NULL))
        if not raw.isdigit() or int(raw) > cap:
            if used and not raw.isdigit():
                raise Refused(400, "invalid_type", f"{name!r} must be a positive integer.", param=name)
            fields[name] = Raw(_ENCODE(cap))
            changed[name] = cap


def _same_number(raw: Raw | None, value: float) -> bool:
    try:
        return raw is not None and float(bytes(raw)) == value
    except ValueError:
        return False
