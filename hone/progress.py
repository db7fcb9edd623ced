"""Live progress of a run, from the steps in the store: a table on a terminal, lines elsewhere."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

import msgspec

from capture.store import Store
from capture.types import StepRow
from hone.state import State
from hone.status import look

if TYPE_CHECKING:
    from rich.console import Group

REFRESH_S = 1.0
ROWS_MAX = 12
TIMES = ("wait_s", "data_s", "mismatch_s", "forward_backward_s", "commit_s", "publish_s")
SCORE = "score_"


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown."""

    run_id: str
    steps: list[StepRow]
    waiting_for: str
    rollouts: int
    rollouts_s: float  # per second since the run was first looked at


def scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Means of the named scores."""
    return {name.removeprefix(SCORE): value for name, value in metrics.items() if name.startswith(SCORE)}


def time_split(metrics: Mapping[str, float]) -> str:
    """`wait 40 % data 5 % ...` of the learner's wall time; parts under 1 % are left out."""
    seconds = {name: metrics.get(name, 0.0) for name in TIMES}
    total = sum(seconds.values())
    if total <= 0:
        return ""
    shares = ((name.removesuffix("_s").replace("_", "/"), value / total) for name, value in seconds.items())
    return " ".join(f"{name} {100 * share:.0f}%" for name, share in shares if share >= 0.01)


def cells(row: StepRow) -> dict[str, str]:
    """One step as named cells, in the order of the columns."""
    metrics = row.metrics
    groups = metrics.get("groups", 0.0)
    flat = metrics.get("zero_variance_groups", 0.0)
    return {
        "step": str(row.step),
        "version": f"v{row.version}",
        "reward": f"{metrics.get('reward_mean', float('nan')):.3f}",
        **{name: f"{value:.2f}" for name, value in scores(metrics).items()},
        "flat groups": f"{flat:.0f}/{groups:.0f}",
        "staleness": f"{metrics.get('staleness_mean', 0.0):.1f}",
        "time": time_split(metrics),
    }


def line(row: StepRow, rollouts_s: float) -> str:
    """One step as a line of text."""
    named = cells(row)
    named["rollouts/s"] = f"{rollouts_s:.1f}"
    return "  ".join(f"{name} {value}" for name, value in named.items() if value)


class Progress:
    """Watches one run until it is cancelled."""

    def __init__(
        self, store: Store, run_id: str, supervisors: Callable[[], Sequence[State]], out: TextIO | None = None
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._supervisors = supervisors
        self._out = out or sys.stdout
        self._began = time.monotonic()
        self._rollouts_before = sum(store.counts(run_id).rollouts.values())
        self._shown = len(store.steps(run_id))
        self._sentence = ""

    async def run(self) -> None:
        """Refresh every second until cancelled; the last state stays on the screen."""
        if self._out.isatty():
            await self._live()
        else:
            while True:
                self._plain(self._view())
                await asyncio.sleep(REFRESH_S)

    async def _live(self) -> None:
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=self._out), auto_refresh=False, transient=False) as live:
            while True:
                live.update(screen(self._view()), refresh=True)
                await asyncio.sleep(REFRESH_S)

    def _plain(self, view: View) -> None:
        for row in view.steps[self._shown :]:
            print(line(row, view.rollouts_s), file=self._out, flush=True)
        kind = view.waiting_for.split(":")[0]
        if not view.steps and kind != self._sentence:  # the numbers behind the colon change all the time
            print(view.waiting_for, file=self._out, flush=True)
        self._shown, self._sentence = len(view.steps), kind

    def _view(self) -> View:
        policy = self._store.lineage(self._run_id).policy
        status = look(self._store, policy, self._supervisors(), sums=False)
        counts = status.counts
        rollouts = sum(counts.rollouts.values()) if counts else 0
        elapsed = max(time.monotonic() - self._began, 1e-3)
        return View(
            run_id=self._run_id,
            steps=self._store.steps(self._run_id),
            waiting_for=status.waiting_for,
            rollouts=rollouts,
            rollouts_s=(rollouts - self._rollouts_before) / elapsed,
        )


def screen(view: View) -> "Group":
    """The table of the newest steps, as rich renders it."""
    from rich import console
    from rich.table import Table
    from rich.text import Text

    head = f"run {view.run_id}: {view.rollouts} rollouts, {view.rollouts_s:.1f} a second"
    table = Table(box=None, pad_edge=False)
    rows = [cells(row) for row in view.steps[-ROWS_MAX:]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        table.add_column(name, justify="left" if name == "time" else "right")
    for row in rows:
        table.add_row(*(row.get(name, "") for name in columns))
    return console.Group(Text(head, style="bold"), Text(view.waiting_for), table)
