"""Progress of a run as text."""

import asyncio
import io
from pathlib import Path

from rich.console import Console

from capture.store import Store
from capture.types import StepRow
from hone.curve import draw, smooth
from hone.progress import Progress, View, cells, line, screen, time_split

ROW = StepRow(
    run_id="one",
    batch_id="b",
    step=7,
    version=9,
    committed_at=0.0,
    metrics={
        "reward_mean": 0.5,
        "score_win": 0.25,
        "score_invalid": 0.125,
        "groups": 32.0,
        "zero_variance_groups": 4.0,
        "staleness_mean": 1.25,
        "wait_s": 6.0,
        "forward_backward_s": 3.95,
        "commit_s": 0.05,
    },
)


def test_a_step_is_one_line() -> None:
    assert line(ROW, 31.25) == (
        "step 7  version v9  reward 0.500  win 0.25  invalid 0.12  flat groups 4/32  staleness 1.2"
        "  time wait 60% forward/backward 40%  rollouts/s 31.2"
    )


def test_the_time_split_leaves_out_what_is_under_one_per_cent() -> None:
    assert time_split(ROW.metrics) == "wait 60% forward/backward 40%"
    assert time_split({}) == ""


def test_columns_come_from_the_scores() -> None:
    assert list(cells(ROW)) == [
        *("step", "version", "reward", "win", "invalid", "flat groups", "staleness", "time")
    ]


def test_the_screen_shows_the_newest_steps_and_the_sentence() -> None:
    steps = [
        StepRow(
            run_id="one", batch_id="b", step=n, version=n, committed_at=0.0, metrics={"reward_mean": n / 100}
        )
        for n in range(1, 31)
    ]
    view = View(run_id="one", steps=steps, waiting_for="Training is at work.", rollouts=64, rollouts_s=8.0)
    out = io.StringIO()
    Console(file=out, width=120).print(screen(view))
    lines = out.getvalue().splitlines()
    assert lines[0].strip() == "run one: 64 rollouts, 8.0 a second"
    assert lines[1].strip() == "Training is at work."
    assert lines[-1].split() == ["30", "v30", "0.300", "0/0", "0.0"]
    assert lines[3].split()[0] == "19"
    assert len(lines) == 3 + 12


async def test_without_a_terminal_it_prints_lines(store: Store) -> None:
    store.start_run("one", "policy", {})
    out = io.StringIO()
    watching = asyncio.create_task(Progress(store, "one", list, out).run())
    await asyncio.wait({watching}, timeout=0.3)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert out.getvalue() == "Nothing runs here: start with `hone up` or `hone train`.\n"


def test_smoothing_averages_what_came_before() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0], window=2) == [1.0, 2.0, 4.0, 6.0]
    assert smooth([]) == []


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    draw([ROW], None, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
