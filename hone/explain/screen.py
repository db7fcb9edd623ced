"""An explained rollout as styled lines. Pure: nothing is printed here.

Whatever a colour says, a word beside it says too. Text of agents and models loses its control
characters, so that it cannot drive the terminal.
"""

import re
import time
from collections.abc import Iterator, Sequence

import msgspec
from rich.text import Text

from capture.store import WaitingCall
from hone.explain.explanation import Explanation, GroupView
from hone.explain.facts import ROOT, CallView, TokenCount
from hone.explain.words import count, number

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
    told = {reason: text for reason, text in explanation.reasons.items() if reason != ROOT}
    if told:
        yield Text()
    for reason, text in told.items():
        yield Text(f"  {reason}: {text}", style="dim")


def head(explanation: Explanation) -> Iterator[Text]:
    """What the rollout is, in a few lines."""
    e = explanation
    none = "no version yet" if e.state == "open" else "no version"
    versions = ", ".join(f"v{version}" for version in e.versions) or none
    words = [
        e.mode,
        *(["for training"] if e.passive else []),
        e.state,
        *([e.status] if e.status else []),
        versions,
    ]
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
    line.append(f"  {count(tokens, 'token')} {version(first)} ")
    line.append(first.fate, style=style(first.fate))
    line.append(troubles(first), style=LOST)
    return line


def place(call: CallView) -> str:
    """Where the call stands in the call graph."""
    if call.fork == ROOT:
        return "begins a conversation"
    said = [] if call.parent is None else [f"continues {call.parent}"]
    if call.fork is not None:
        left = "" if call.left is None else f", leaves {call.left}"
        said.append(f"new branch ({call.fork}{left})")
    return ", ".join(said)


def version(call: CallView) -> str:
    """The version that sampled it, or the model where it is none of ours."""
    if call.policy is None:
        return clean(call.model) or "another model"
    return "no version" if call.policy_version is None else f"v{call.policy_version}"


def troubles(call: CallView) -> str:
    """What went wrong with it, to stand after its line; empty: nothing."""
    found = [f"status {call.status}"] if call.status != 200 else []
    found += [clean(call.error)] if call.error else []
    found += ["late"] if call.late else []
    found += ["not delivered"] if call.undelivered else []
    found += [f"retry {call.retry_count}"] if call.retry_count else []
    return f"  ({', '.join(found)})" if found else ""


def unread(waiting: Sequence[WaitingCall]) -> Iterator[Text]:
    """Calls that were committed and not parsed yet: nothing more is known of them."""
    if waiting:
        yield Text()
    for call in waiting:
        late = ", late" if call.late else ""
        yield Text(f"  {call.id}  not read yet (status {call.status}{late})", style=STYLES["pending"])
