"""A tested script as a picture: how rewards are distributed, and how they spread within scenarios."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from capture.errors import ConfigError
from rewards.report import Report, Row

SCENARIOS_SHOWN = 40


def draw(report: Report, rows: list[Row], path: Path) -> None:
    """Write a PNG. `ConfigError` if matplotlib is not installed or the file cannot be written."""
    try:
        from matplotlib.figure import Figure  # no pyplot: nothing global, no display
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _distribution(left, report)
    _scenarios(right, report, rows)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"--plot: cannot write {path}: {error}") from error


def _distribution(axes: Any, report: Report) -> None:
    places = [(bar.low + bar.high) / 2 for bar in report.histogram]
    width = 0.9 * min((after - before for before, after in pairwise(places)), default=0.1)
    axes.bar(places, [bar.count for bar in report.histogram], width, color="tab:blue")
    axes.set(xlabel="reward", ylabel="rollouts", title=f"{report.scored} rewards, {report.failed} failures")


def _scenarios(axes: Any, report: Report, rows: list[Row]) -> None:
    """A dot for each reward, a dash for each scenario's mean."""
    several = [row for row in report.scenarios if row.attempts > 1] or report.scenarios
    shown = several[:SCENARIOS_SHOWN]
    at = {row.scenario_id: number for number, row in enumerate(shown)}
    scored = [row for row in rows if row.scenario_id in at and row.reward is not None]
    across = [at[row.scenario_id or ""] for row in scored]
    axes.scatter(across, [row.reward for row in scored], s=12, alpha=0.5, color="tab:blue")
    means = [row.mean for row in shown]
    axes.scatter(list(at.values()), means, marker="_", s=120, color="black", label="mean")
    axes.set(xlabel="scenario, the widest spread first", ylabel="reward", xticks=[])
    axes.set_title(f"{len(shown)} of {len(report.scenarios)} scenarios")
    if shown:
        axes.legend(fontsize="small")
