"""A rollout's conversation as styled lines: each call with what was new in it. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.text import Text

from hone.explain.conversation import Token, Turn
from hone.explain.facts import ROOT, CallView
from hone.explain.screen import LOST, clean, place, style, troubles, version
from hone.explain.words import count

ROLES = {"system": "magenta", "developer": "magenta", "user": "bold", "tool": "bright_blue"}


def conversation(turns: Sequence[Turn], *, chars_max: int, tokens: bool) -> Iterator[Text]:
    """Each call with what was new in it; `chars_max` 0: no message is cut."""
    for turn in turns:
        yield Text()
        yield _turn_head(turn)
        if turn.like is not None and turn.like_messages:
            yield Text(f"  ({count(turn.like_messages, 'message')} as in call {turn.like})", style="dim")
        for message in turn.messages:
            yield from _message(message, chars_max, "")
        if turn.response is not None:
            yield from _message(turn.response, chars_max, style(turn.call.fate))
        elif not turn.call.error:
            yield Text("  (no answer that could be read)", style="dim")
        if tokens and turn.tokens:
            yield _tokens(turn.call, turn.tokens)


def _turn_head(turn: Turn) -> Text:
    call = turn.call
    line = Text()
    line.append(f"── call {call.number}", style="bold").append(f"  {call.id}  ")
    line.append(place(call), style="bold magenta" if call.fork not in (None, ROOT) else "")
    line.append(f"  {version(call)}  {count(call.sampled_tokens, 'token')}  ", style="")
    line.append(call.fate, style=f"bold {style(call.fate)}")
    if call.excluded is not None and call.excluded != call.fate:
        line.append(f" ({call.excluded})", style=LOST)
    if call.finish_reason not in (None, "stop", "tool_calls"):
        line.append(f"  finish {clean(str(call.finish_reason))}", style=LOST)
    line.append(troubles(call), style=LOST)
    return line


def _message(message: Mapping[str, Any], chars_max: int, colour: str) -> Iterator[Text]:
    role = clean(str(message.get("role") or "?"))
    text = _content(message.get("content"))
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    lead = Text(f"  [{role}] ", style=colour or ROLES.get(role, ""))
    if isinstance(reasoning, str):
        yield lead + Text(
            f"(reasoning) {_indented(_cut(reasoning, chars_max))}", style=f"italic {colour}".strip()
        )
    calls = message.get("tool_calls")
    if text or not calls:
        yield lead + Text(_indented(_cut(text, chars_max)), style=colour)
    for call in calls if isinstance(calls, list) else ():
        yield lead + Text(f"→ {_cut(_tool_call(call), chars_max)}", style=colour)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def _content(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(_part(part) for part in content)
    return _json(content)


def _part(part: object) -> str:
    if isinstance(part, dict):
        text = part.get("text")
        return text if isinstance(text, str) else f"<{part.get('type') or 'part'}>"
    return _json(part)


def _tool_call(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _json(call)
    arguments = function.get("arguments")
    return f"{function.get('name')}({arguments if isinstance(arguments, str) else _json(arguments)})"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _cut(text: str, chars_max: int) -> str:
    if not chars_max or len(text) <= chars_max:
        return clean(text)
    return f"{clean(text[:chars_max])} … ({len(text) - chars_max} more characters: --chars 0)"


def _tokens(call: CallView, tokens: Sequence[Token]) -> Text:
    """A table; `owner` is call/branch."""
    table = Text()
    table.append("        id    logprob  mask  version  owner    advantage  token\n", style="dim")
    for token in tokens:
        logprob = "-" if token.logprob is None else f"{round(token.logprob, 4) + 0.0:.4f}"
        version = "-" if token.version is None else f"v{token.version}"
        owner = "-" if token.owner is None else f"{call.number}/{token.branch}"
        advantage = "-" if token.advantage is None else f"{token.advantage:+.4g}"
        text = "" if token.text is None else msgspec.json.encode(token.text).decode()
        table.append(
            f"  {token.id:>8} {logprob:>10} {token.mask:>5}  {version:<7}  {owner:<7}  {advantage:<9}  ",
            style="" if token.mask else "dim",
        )
        table.append(f"{clean(text)}\n", style=style(call.fate))
    table.right_crop(1)
    return table


def cut_off(shown: int, total: int) -> Iterator[Text]:
    """Said where not every call was shown."""
    if shown < total:
        yield Text()
        yield Text(
            f"{shown} of {total} calls shown; --calls 1- shows all, --calls 7-12 some of them.",
            style="dim",
        )


def without_texts(base_model: str) -> Iterator[Text]:
    """Said where tokens are shown by their ids alone."""
    yield Text()
    yield Text(f"The tokenizer of these tokens ({clean(base_model) or 'no model'}) is not here.", style="dim")
