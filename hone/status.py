"""What `hone status` shows: the parts, the counts, what training waits for and how much is usable."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from capture.store import Counts, Store
from capture.types import Balance, EngineVersion, Promotion, StepRow, Version
from hone.explain.usage import Usage, lines, usage
from hone.promotion import standing
from hone.state import PartStatus, State

HEADLINE = ("reward_mean", "zero_variance_groups", "staleness_mean", "mismatch_max", "grad_norm")
NEEDED = ("engine", "proxy", "control", "learn", "runner")


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest run as the store knows it."""

    id: str
    ended: bool
    step: int
    groups_per_batch: int
    last: StepRow | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One look at everything."""

    waiting_for: str
    supervisors: list[State] = []  # live ones
    run: RunView | None = None
    policy: str = ""
    active: Version | None = None
    promoted: Version | None = None
    promotion: Promotion | None = None  # the newest one, whatever became of it
    engines: list[EngineVersion] = []
    counts: Counts | None = None
    balance: Balance | None = None
    usage: Usage | None = None  # None: nothing was sampled yet


def look(store: Store | None, policy: str, supervisors: Sequence[State], *, sums: bool = True) -> Status:
    """Read the store once; without one, what the supervisors say. `sums`: over all calls too."""
    if store is None:
        return Status(waiting_for=waiting_for(supervisors, None, None), supervisors=list(supervisors))
    run_id = store.latest_run()
    run = run_view(store, run_id) if run_id else None
    counts = store.counts(run_id)
    balance = store.balance(policy) if sums else None
    return Status(
        waiting_for=waiting_for(supervisors, run, counts),
        supervisors=list(supervisors),
        run=run,
        policy=policy,
        active=store.active_version(policy),
        promoted=store.promoted_version(policy),
        promotion=next(reversed(store.promotions(policy)), None),
        engines=store.engine_versions(policy),
        counts=counts,
        balance=balance,
        usage=None if balance is None else usage(policy, balance, store.fate_counts(policy)),
    )


def run_view(store: Store, run_id: str) -> RunView:
    """What the store knows of a run."""
    lineage = store.lineage(run_id)
    steps = store.steps(run_id)
    return RunView(
        id=run_id,
        ended=lineage.ended,
        step=lineage.step,
        groups_per_batch=groups_per_batch(store.run_settings(run_id)),
        last=steps[-1] if steps else None,
    )


def groups_per_batch(settings: Mapping[str, Any]) -> int:
    """The setting as it was saved with the run; 1 where it was not."""
    train = settings.get("train")
    value = train.get("groups_per_batch") if isinstance(train, Mapping) else None
    return value if isinstance(value, int) else 1


def waiting_for(supervisors: Sequence[State], run: RunView | None, counts: Counts | None) -> str:
    """What training waits for, in one sentence: the first thing in its way."""
    parts = {part.name: part for state in supervisors for part in state.parts}
    if not parts:
        return "Nothing runs here: start with `hone up` or `hone train`."
    broken = _broken(parts)
    if broken:
        return broken
    if run is None or counts is None or not ({"learn", "runner"} & set(parts)):
        return "Serving without training: `hone train` starts it."
    if run.ended:
        return f"Run {run.id} has ended after {_count(run.step, 'step')}."
    return _stage(run, counts)


def _broken(parts: Mapping[str, PartStatus]) -> str | None:
    for name in NEEDED:
        part = parts.get(name)
        if part is None or part.state in ("ready", "done"):
            continue
        if part.state == "backoff":
            return (
                f"Training waits for {name}, which died ({_exit(part)}) and is started again: see {part.log}."
            )
        if part.state == "failed":
            return f"Training stopped: {name} died too often ({_exit(part)}); see {part.log}."
        if part.state != "waiting":  # what it waits for is the better answer
            return f"Training waits for {name}, which is {part.state}."
    waiting = next((name for name, part in parts.items() if part.state == "waiting"), None)
    return f"Training waits for {waiting}, which has not started." if waiting else None


def _stage(run: RunView, counts: Counts) -> str:
    """Backwards from the learner: the latest stage that has work says what is missing."""
    rollouts, groups = counts.rollouts, counts.groups
    ready = groups.get("closed", 0)
    progress = f"{ready} of {run.groups_per_batch} groups ready"
    if groups.get("taken", 0):
        return f"Training is at work: the learner holds {_count(groups['taken'], 'group')}."
    if ready >= run.groups_per_batch:
        return f"Training waits for the learner to take {_count(ready, 'closed group')}."
    if rollouts.get("open", 0):
        return f"Training waits for agents: {_count(rollouts['open'], 'rollout')} running, {progress}."
    if rollouts.get("sealed", 0):
        behind = f"{_count(counts.calls_not_ingested, 'call')} to read"
        finished = _count(rollouts["sealed"], "finished rollout")
        return f"Training waits for ingest: {finished}, {behind}, {progress}."
    if rollouts.get("ingested", 0):
        unscored = _count(rollouts["ingested"], "rollout")
        return f"Training waits for the reward script: {unscored} without a score, {progress}."
    if groups.get("open", 0):
        return f"Training waits for {_count(groups['open'], 'open group')} to close, {progress}."
    if rollouts.get("reward_error", 0) and not ready:
        return (
            f"Training waits for rewards: the script failed on {_count(rollouts['reward_error'], 'rollout')}."
        )
    return f"Training waits for the runner to start agents, {progress}."


def _exit(part: PartStatus) -> str:
    code = part.exit_code
    if code is None:
        return "no exit code"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def render(status: Status) -> str:
    """One screen of text."""
    shown = [status.waiting_for]
    for state in status.supervisors:
        shown += ["", f"hone {state.kind} (pid {state.pid})"]
        for part in state.parts:
            restarts = f"{_count(part.restarts, 'restart')}" if part.restarts else ""
            shown.append(f"  {part.name:<10}{part.state:<10}{part.pid or '':<9}{restarts}".rstrip())
    if status.run is not None:
        shown += ["", *_run_lines(status, status.run)]
    if status.usage is not None:
        shown += ["", status.usage.sentence, *lines(status.usage)]
    if status.balance is not None and not status.balance.exact:
        shown += ["", f"The tokens do not add up: {balance_line(status.balance)}"]
    return "\n".join(shown).rstrip()


def _run_lines(status: Status, run: RunView) -> list[str]:
    served = f"active v{status.active.version}" if status.active else "no active version"
    if status.promoted:
        served += f", promoted v{status.promoted.version}"
    shown = [f"run {run.id}: step {run.step}, {status.policy} {served}"]
    if text := standing(status.promoted, status.promotion):
        shown.append(f"  promoted  {text}")
    newest: dict[str, EngineVersion] = {}
    for row in status.engines:
        if row.engine not in newest or row.at >= newest[row.engine].at:
            newest[row.engine] = row
    shown += [f"  engine {name}: v{row.version} {row.state}" for name, row in sorted(newest.items())]
    if status.counts is not None:
        shown.append(f"  rollouts  {_listed(status.counts.rollouts)}")
        shown.append(f"  groups    {_listed(status.counts.groups)}")
        shown.append(f"  calls     {status.counts.calls}, {status.counts.failed_calls} failed")
    if run.last is not None:
        shown.append(f"  last step {run.last.step} (v{run.last.version}): {_headline(run.last.metrics)}")
    return shown


def _headline(metrics: Mapping[str, float]) -> str:
    names = [name for name in metrics if name in HEADLINE or name.startswith("score_")]
    return ", ".join(f"{name} {metrics[name]:.4g}" for name in names)


def balance_line(balance: Balance) -> str:
    """`sampled = trained + ... + pending`, with its numbers."""
    terms = [f"{balance.trained} trained", f"{balance.zero_advantage} zero advantage"]
    for name in ("dropped", "untrainable", "not_for_training"):
        reasons: dict[str, int] = getattr(balance, name)
        if reasons:
            terms.append(f"{sum(reasons.values())} {name.replace('_', ' ')} ({_listed(reasons)})")
    terms.append(f"{balance.pending} pending")
    sign = "=" if balance.exact else "≠"
    return f"{balance.sampled} sampled {sign} {' + '.join(terms)}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items()) if number) or "none"
