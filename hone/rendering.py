"""An explained rollout and its conversation as styled lines. Pure: nothing is printed here.

Whatever a colour says, a word beside it says too. Text of agents and models loses its control
characters, so that it cannot drive the terminal.
"""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.text import Text

from capture.graph import ROOT
from capture.store import WaitingCall
from hone.conversation import Token, Turn
from hone.explain import Explanation, GroupView
from hone.facts import CallView, TokenCount
from hone.words import count, number

MEMBERS_SHOWN_MAX = 32
CALLS_SHOWN_MAX = 200
STYLES = {
    "trained": "green",
    "zero_advantage": "blue",
    "pending": "yellow",
    "eval": "cyan",
    "observe": "cyan",
}
LOST = "red"  # of every other fate: it has a reason that is counted
OPENINGS = {
    "Trained": "bold green",
    "Not yet": "bold yellow",
    "Not for training": "bold cyan",
    "Not trained": "bold red",
}
ROLES = {"system": "magenta", "developer": "magenta", "user": "bold", "tool": "bright_blue"}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    r"""Control characters as `\x1b`; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def style(fate: str) -> str:
    """The colour of what became of tokens."""
    return STYLES.get(fate, LOST)


def sentence(explanation: Explanation) -> Text:
    """The answer, alone on its line."""
    opening = explanation.sentence.partition(":")[0]
    return Text(clean(explanation.sentence), style=OPENINGS.get(opening, "bold"))


# -- explain ---------------------------------------------------------------------------------------


def explained(explanation: Explanation) -> Iterator[Text]:
    """The sentence first, then what it rests on."""
    yield sentence(explanation)
    if explanation.setting is not None:
        value = explanation.setting_value
        shown = "" if value is None else f", which is {msgspec.json.encode(value).decode()}"
        yield Text(f"The setting to look at: {explanation.setting}{shown}.", style="dim")
    yield Text()
    yield from head(explanation)
    if explanation.reward_error:
        yield Text()
        yield Text(clean(explanation.reward_error.rstrip()), style="red")
    yield from _timeline(explanation)
    if explanation.group is not None:
        yield from _group(explanation.group)
    yield from _calls(explanation)
    if explanation.reasons:
        yield Text()
        for reason, text in explanation.reasons.items():
            yield Text(f"  {reason}: {text}", style="dim")


def head(explanation: Explanation) -> Iterator[Text]:
    """What the rollout is, in a few lines."""
    e = explanation
    versions = ", ".join(f"v{version}" for version in e.versions) or "no version"
    words = [e.mode, e.state, *([e.status] if e.status else []), versions]
    words += ["headless"] if e.headless else []
    words += [f"run {e.run_id}"] if e.run_id else []
    words += [f"scenario {e.scenario_id}"] if e.scenario_id else []
    words.append(count(len(e.calls) + len(e.waiting), "call"))
    yield Text(f"{e.rollout_id}: {clean(', '.join(words))}", style="bold")
    if e.reward is not None or e.scores:
        scores = ", ".join(f"{clean(name)} {number(value)}" for name, value in sorted(e.scores.items()))
        reward = "none" if e.reward is None else number(e.reward)
        yield Text(f"  reward     {reward}{f'  ({scores})' if scores else ''}")
    if e.group is not None:
        advantage = "" if e.advantage is None else f", advantage {e.advantage:+.4g}"
        yield Text(
            f"  group      {e.group.id}, {e.group.state}, {count(len(e.group.members), 'attempt')}{advantage}"
        )
    if e.staleness is not None:
        yield Text(f"  staleness  {count(e.staleness, 'version')}")
    yield Text(f"  tokens     {tokens_line(e.tokens)}")


def tokens_line(tokens: TokenCount) -> str:
    """`35 sampled = 31 trained + 4 grammar`."""
    terms = {
        "trained": tokens.trained,
        "with zero advantage": tokens.zero_advantage,
        "pending": tokens.pending,
        "dropped": tokens.dropped,
        **tokens.untrainable,
        "not for training": tokens.not_for_training,
    }
    listed = " + ".join(f"{amount} {name}" for name, amount in terms.items() if amount)
    other = f"; {tokens.elsewhere} by models that are not being trained" if tokens.elsewhere else ""
    return f"{tokens.sampled} sampled{' = ' + listed if listed else ''}{other}"


def _timeline(explanation: Explanation) -> Iterator[Text]:
    yield Text()
    yield Text("timeline", style="bold")
    day = ""
    for moment in explanation.timeline:
        when = ""
        if moment.at is not None:
            at = time.localtime(moment.at)
            date = time.strftime("%Y-%m-%d", at)
            if date != day:
                yield Text(f"  {date}", style="dim")
            day = date
            when = f"{time.strftime('%H:%M:%S', at)}.{int(moment.at % 1 * 10)}"
        yield Text(f"  {when:<12}{clean(moment.what)}")


def _group(group: GroupView) -> Iterator[Text]:
    yield Text()
    declared = f", {group.size} declared" if group.size else ""
    members = f"{count(len(group.members), 'attempt')}{declared}"
    yield Text(f"group {group.id} ({group.state}, {members})", style="bold")
    ordered = sorted(group.members, key=lambda member: not member.this)
    for member in sorted(ordered[:MEMBERS_SHOWN_MAX], key=lambda member: member.id):
        reward = "-" if member.reward is None else number(member.reward)
        advantage = "" if member.advantage is None else f"{member.advantage:+.4g}"
        version = "-" if member.policy_version is None else f"v{member.policy_version}"
        why = " ".join(filter(None, [member.state, member.drop_reason if member.state == "dropped" else ""]))
        status = member.status or "not finished"
        retry = f"attempt {member.attempt + 1}" if member.attempt else ""
        yield Text(
            f"  {'→' if member.this else ' '} {member.id}  {version:<5} {status:<16} reward {reward:<8} "
            f"{advantage:<9} {why} {retry}".rstrip(),
            style="bold" if member.this else "",
        )
    if len(group.members) > MEMBERS_SHOWN_MAX:
        yield Text(f"    … and {len(group.members) - MEMBERS_SHOWN_MAX} more", style="dim")


def _calls(explanation: Explanation) -> Iterator[Text]:
    yield Text()
    yield Text("calls", style="bold")
    rows = list(runs(explanation.calls))
    for run in rows[:CALLS_SHOWN_MAX]:
        yield _run_line(run)
    if len(rows) > CALLS_SHOWN_MAX:
        left = sum(len(run) for run in rows[CALLS_SHOWN_MAX:])
        yield Text(f"  … and {count(left, 'more call')}: --json has them all", style="dim")
    yield from unread(explanation.waiting)
    if not explanation.calls and not explanation.waiting:
        yield Text("  none", style="dim")


def runs(calls: Sequence[CallView]) -> Iterator[list[CallView]]:
    """Consecutive calls of which each continues the one before and met the same fate, together."""
    run: list[CallView] = []
    for call in calls:
        plain = call.error is None and call.parent == call.number - 1
        if run and plain and (call.fate, call.policy_version) == (run[-1].fate, run[-1].policy_version):
            run.append(call)
            continue
        if run:
            yield run
        run = [call]
    if run:
        yield run


def _run_line(run: Sequence[CallView]) -> Text:
    first, last = run[0], run[-1]
    numbers = str(first.number) if len(run) == 1 else f"{first.number}-{last.number}"
    ids = first.id if len(run) == 1 else f"{first.id} … {last.id}"
    tokens = sum(call.sampled_tokens for call in run)
    line = Text(f"  {numbers:>6}  {ids}  {place(first)}")
    if len(run) > 1:
        line.append(", then each continues the one before")
    line.append(f"  {count(tokens, 'token')} {_version(first)} ")
    line.append(first.fate, style=style(first.fate))
    line.append(_troubles(first), style=LOST)
    return line


def place(call: CallView) -> str:
    """Where the call stands in the call graph."""
    if call.parent is not None:
        return f"continues {call.parent}"
    return "begins a conversation" if call.fork == ROOT else f"new branch ({call.fork})"


def _version(call: CallView) -> str:
    if call.policy is None:
        return clean(call.model) or "another model"
    return "no version" if call.policy_version is None else f"v{call.policy_version}"


def _troubles(call: CallView) -> str:
    found = [f"status {call.status}"] if call.status != 200 else []
    found += [clean(call.error)] if call.error else []
    found += ["late"] if call.late else []
    found += ["not delivered"] if call.undelivered else []
    found += [f"retry {call.retry_count}"] if call.retry_count else []
    return f"  ({', '.join(found)})" if found else ""


# -- show ------------------------------------------------------------------------------------------


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
    line.append(f"  {_version(call)}  {count(call.sampled_tokens, 'token')}  ", style="")
    line.append(call.fate, style=f"bold {style(call.fate)}")
    if call.excluded is not None and call.excluded != call.fate:
        line.append(f" ({call.excluded})", style=LOST)
    if call.finish_reason not in (None, "stop", "tool_calls"):
        line.append(f"  finish {clean(str(call.finish_reason))}", style=LOST)
    line.append(_troubles(call), style=LOST)
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
    table = Text("        id    logprob  mask  version  owner    advantage  token\n", style="dim")
    for token in tokens:
        logprob = "-" if token.logprob is None else f"{round(token.logprob, 4) + 0.0:.4f}"
        version = "-" if token.version is None else f"v{token.version}"
        owner = "-" if token.owner is None else f"{call.number}/{token.branch}"
        advantage = "-" if token.advantage is None else f"{token.advantage:+.4g}"
        text = "" if token.text is None else msgspec.json.encode(token.text).decode()
        table.append(
            f"  {token.id:>8} {logprob:>10} {token.mask:>5}  {version:<7}  {owner:<7}  {advantage:<9}  ",
        )
        table.append(f"{clean(text)}\n", style=style(call.fate))
    table.right_crop(1)
    return table


def unread(waiting: Sequence[WaitingCall]) -> Iterator[Text]:
    """Calls that were committed and not parsed yet: nothing more is known of them."""
    if waiting:
        yield Text()
    for call in waiting:
        late = ", late" if call.late else ""
        yield Text(f"  {call.id}  not read yet (status {call.status}{late})", style=STYLES["pending"])


def cut_off(shown: int, total: int) -> Iterator[Text]:
    """Said where not every call was shown."""
    if shown < total:
        yield Text()
        yield Text(
            f"{shown} of {total} calls shown; --calls 1- shows all, --calls 7-12 some of them.",
            style="dim",
        )
