"""Stored rollouts as lines for supervised fine-tuning: conversations, or exact tokens."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from capture import graph
from capture.errors import NotFound
from capture.fingerprint import fingerprint
from capture.reasons import NOT_FOR_TRAINING, UNTRAINABLE
from capture.store import Store
from capture.types import Rollout, Sample
from hone.traffic.conversations import LENGTH, conversations
from hone.traffic.filters import Filters, Seen, matching, of_a_judge
from hone.traffic.lines import LinesFile
from hone.traffic.scenarios import first_request

Format = Literal["messages", "tokens"]

UNFINISHED: Final = ("open", "sealed")
LEFT_OUT: Final[dict[str, str]] = {
    "unfinished": "open, or not ingested yet; --state takes them all the same",
    "eval": "they measure the policy; --mode eval takes them all the same",
    "judge": "a reward script's judge asked; --scenario hone-judge takes them all the same",
    "failed": "the infrastructure failed; --state takes them all the same",
    "no_reward": "--best-of compares rewards",
    "no_scenario": "--best-of compares rollouts of one scenario",
    "not_best": "others of the scenario have more reward",
    "nothing": "no call of it is left",
}
"""Why rollouts that fit the filters are left out -> what that means."""
CALLS_LEFT_OUT: Final[dict[str, str]] = {
    **UNTRAINABLE,
    **NOT_FOR_TRAINING,
    LENGTH: "The answer was cut off at its limit of tokens.",
}
"""Why calls are left out -> sentence."""


class LeftOut(msgspec.Struct):
    """What was not taken, by reason."""

    rollouts: Counter[str] = msgspec.field(default_factory=Counter)
    calls: Counter[str] = msgspec.field(default_factory=Counter)

    def told(self) -> list[str]:
        """One line a reason, the most frequent first."""
        return _told("rollouts", self.rollouts, LEFT_OUT) + _told("calls", self.calls, CALLS_LEFT_OUT)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `hone rollouts export` did."""

    out: str
    format: Format
    lines: int
    rollouts: int  # that have lines
    left_out: LeftOut


def export(
    store: Store,
    filters: Filters,
    format: Format,
    out: Path,
    *,
    best_of: int | None = None,
    force: bool = False,
    seen: Seen | None = None,
) -> Summary:
    """Write the file, rollout by rollout; `NotFound` if there is nothing to write."""
    left_out = LeftOut()
    lines_of = _FORMATS[format]
    rollouts = 0
    with LinesFile(out, force=force) as file:
        for rollout in chosen(store, filters, left_out, best_of=best_of, seen=seen):
            before = file.lines
            for line in lines_of(store, rollout, left_out):
                file.write(line)
            rollouts += file.lines > before
            left_out.rollouts["nothing"] += file.lines == before
        if not file.lines:
            raise nothing_left(filters, left_out)
    left_out.rollouts += Counter()  # without zeros
    return Summary(out=str(out), format=format, lines=file.lines, rollouts=rollouts, left_out=left_out)


def nothing_left(filters: Filters, left_out: LeftOut) -> NotFound:
    """The error that nothing of what fits can be used."""
    left_out.rollouts += Counter()
    fit = left_out.rollouts.total()
    if not fit:
        return filters.nothing()
    return NotFound("; ".join([f"{fit} rollouts fit, none can be used", *left_out.told()]))


def chosen(
    store: Store,
    filters: Filters,
    left_out: LeftOut,
    *,
    best_of: int | None = None,
    seen: Seen | None = None,
) -> Iterator[Rollout]:
    """The rollouts that fit and are finished; with `best_of` that many of each scenario, by reward."""
    fit = _finished(matching(store, filters, seen=seen), filters, left_out)
    if best_of is None:
        yield from fit
        return
    for rollout_id in _best(fit, best_of, left_out):
        yield store.rollout(rollout_id)


def _finished(rollouts: Iterator[Rollout], filters: Filters, left_out: LeftOut) -> Iterator[Rollout]:
    for rollout in rollouts:
        if rollout.state in UNFINISHED and not filters.states:
            left_out.rollouts["unfinished"] += 1
        elif of_a_judge(rollout, filters):
            left_out.rollouts["judge"] += 1
        elif rollout.mode == "eval" and filters.mode is None:
            left_out.rollouts["eval"] += 1
        elif rollout.status == "failed" and not filters.states and not filters.statuses:
            left_out.rollouts["failed"] += 1
        else:
            yield rollout


def _best(rollouts: Iterator[Rollout], count: int, left_out: LeftOut) -> list[str]:
    """Ids of the `count` with the highest reward of each scenario, of equals the newest; in order."""
    best: dict[str, list[tuple[float, str]]] = {}
    for rollout in rollouts:
        if rollout.reward is None or rollout.scenario_id is None:
            left_out.rollouts["no_reward" if rollout.reward is None else "no_scenario"] += 1
            continue
        heap = best.setdefault(rollout.scenario_id, [])
        if len(heap) < count:
            heapq.heappush(heap, (rollout.reward, rollout.id))
        else:
            heapq.heappushpop(heap, (rollout.reward, rollout.id))
            left_out.rollouts["not_best"] += 1
    return sorted(rollout_id for heap in best.values() for _, rollout_id in heap)


def own_samples(store: Store, rollout: Rollout, left_out: LeftOut) -> tuple[str, list[Sample]]:
    """The rollout's scenario (a fingerprint where it names none), and what it sampled and may be trained."""
    calls = store.calls(rollout.id)
    nodes = graph.build(calls)
    left_out.calls.update(fate.excluded for fate in graph.fates(nodes) if fate.excluded is not None)
    first = first_request(calls)
    named = rollout.scenario_id or (fingerprint(first.messages, first.tools) if first else rollout.id)
    return named, graph.samples(nodes)


def _tokens(store: Store, rollout: Rollout, left_out: LeftOut) -> Iterator[Any]:
    for sample in own_samples(store, rollout, left_out)[1]:
        yield {
            **msgspec.structs.asdict(sample),
            "scenario_id": rollout.scenario_id,
            "reward": rollout.reward,
            "status": rollout.status,
        }


def _messages(store: Store, rollout: Rollout, left_out: LeftOut) -> Iterator[Any]:
    found, reasons = conversations(rollout, store.calls(rollout.id))
    left_out.calls.update(reasons)
    yield from found


_FORMATS: Mapping[Format, Callable[[Store, Rollout, LeftOut], Iterator[Any]]] = {
    "messages": _messages,
    "tokens": _tokens,
}


def _told(what: str, counts: Counter[str], sentences: Mapping[str, str]) -> list[str]:
    return [
        f"left out: {count} {what} {reason} ({sentences.get(reason, reason).rstrip('.')})"
        for reason, count in counts.most_common()
        if count
    ]
