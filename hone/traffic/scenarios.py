"""Captured first requests as a scenario set: what agents were asked, each task once."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from capture.errors import NotFound
from capture.fingerprint import fingerprint
from capture.normalise import opening
from capture.store import Store
from capture.types import ModelCall
from hone.traffic.filters import Filters, Seen, matching, of_a_judge
from hone.traffic.lines import LinesFile
from rollouts.scenarios import LINE_BYTES_MAX

NAMED = 3  # rollouts that a scenario names

LEFT_OUT = {
    "judge": "a reward script's judge asked; --scenario hone-judge takes it all the same",
    "no_call": "it has none, or none is ingested yet",
    "no_user_message": "nobody asked anything before the first answer",
    "too_long": f"a scenario may have {LINE_BYTES_MAX} bytes",
}


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What `hone scenarios from-rollouts` did."""

    out: str
    scenarios: int  # written
    distinct: int  # first requests that differ; the rarest are past `--limit`
    rollouts: int  # that fit the filters
    under_way: int  # of them those whose first request held answers already: their task is what came before
    left_out: dict[str, int]  # rollouts (too_long: scenarios) by reason, see `LEFT_OUT`


class _Task:
    """One distinct first request, without its text: counted first, written later."""

    __slots__ = ("count", "newest")

    def __init__(self) -> None:
        self.count = 0
        self.newest: list[str] = []  # ids, oldest first

    def add(self, rollout_id: str) -> None:
        self.count += 1
        self.newest = [*self.newest[-NAMED + 1 :], rollout_id]


def from_rollouts(
    store: Store,
    filters: Filters,
    out: Path,
    *,
    limit: int | None = None,
    force: bool = False,
    seen: Seen | None = None,
) -> Summary:
    """Write the scenario set, the most frequent first, of equally frequent ones the newest.

    The rollouts are read twice: to count, then the newest of each task for its text. So what is held at
    once is an id a task, never the texts. `NotFound` if there is nothing to write.
    """
    with LinesFile(out, force=force) as file:
        tasks, under_way, left_out = _count(store, filters, seen)
        looked_at = sum(task.count for task in tasks.values()) + left_out.total()
        if not looked_at:
            raise filters.nothing()
        if not tasks:
            raise NotFound(f"{looked_at} rollouts fit, none gives a scenario: {reasons(left_out)}")
        ordered = sorted(tasks, key=lambda id: (tasks[id].count, tasks[id].newest[-1]), reverse=True)
        lines = (_line(store, id, tasks[id]) for id in ordered)
        for line in itertools.islice(_short(lines, left_out), limit):
            file.write_line(line)
    return Summary(
        out=str(out),
        scenarios=file.lines,
        distinct=len(tasks),
        rollouts=looked_at,
        under_way=under_way,
        left_out=dict(left_out),
    )


def reasons(left_out: Mapping[str, int]) -> str:
    """Counts with what each means."""
    return "; ".join(f"{count} {name} ({LEFT_OUT[name]})" for name, count in sorted(left_out.items()))


def _count(store: Store, filters: Filters, seen: Seen | None) -> tuple[dict[str, _Task], int, Counter[str]]:
    tasks: dict[str, _Task] = {}
    left_out = Counter[str]()
    under_way = 0
    for rollout in matching(store, filters, seen=seen):
        if of_a_judge(rollout, filters):
            left_out["judge"] += 1
            continue
        first = first_request(store.calls(rollout.id))
        asked = [] if first is None else opening(first.messages)
        if first is None or not any(message.get("role") == "user" for message in asked):
            left_out["no_call" if first is None else "no_user_message"] += 1
            continue
        tasks.setdefault(fingerprint(asked, first.tools), _Task()).add(rollout.id)
        under_way += len(asked) < len(first.messages)
    return tasks, under_way, left_out


def first_request(calls: Sequence[ModelCall]) -> ModelCall | None:
    """Of calls in the order of their start, the first on time that says anything; answered or not."""
    return next((call for call in calls if call.messages and not call.late), None)


def _line(store: Store, id: str, task: _Task) -> bytes:
    first = first_request(store.calls(task.newest[-1]))
    scenario: dict[str, Any] = {
        "id": id,
        "messages": [] if first is None else opening(first.messages),
        "tools": [] if first is None else first.tools,
        "count": task.count,
        "rollouts": task.newest[::-1],
    }
    return msgspec.json.encode(scenario)


def _short(lines: Iterator[bytes], left_out: Counter[str]) -> Iterator[bytes]:
    for line in lines:
        if len(line) <= LINE_BYTES_MAX:
            yield line
        else:
            left_out["too_long"] += 1
