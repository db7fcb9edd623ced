"""The learning curve as a picture."""

from collections.abc import Sequence
from pathlib import Path

from capture.types import StepRow
from hone.summary import Summary

SHOWN = {"win": "tab:green", "draw": "tab:blue", "loss": "tab:red", "invalid": "tab:orange"}
WINDOW = 5


def smooth(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and those before it, at most `window` together."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def draw(steps: Sequence[StepRow], summary: Summary | None, path: Path) -> None:
    """Reward and results in training by step, and the evaluations before and after."""
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    numbers = [row.step for row in steps]
    reward = [row.metrics.get("reward_mean", float("nan")) for row in steps]
    left.plot(numbers, smooth(reward), color="black", label="mean reward")
    for name, colour in SHOWN.items():
        if steps and f"score_{name}" in steps[-1].metrics:
            values = [row.metrics.get(f"score_{name}", float("nan")) for row in steps]
            left.plot(numbers, smooth(values), color=colour, label=name)
    left.set(xlabel="step", title=f"training rollouts (mean of {WINDOW} steps)", ylim=(0, 1.25))
    left.legend(loc="upper left", ncols=3, fontsize="small")
    if summary is not None:
        shown = (("random", "wins"), ("optimal", "draws"), ("random", "invalid"), ("optimal", "invalid"))
        for offset, label, column in ((-0.2, "before", summary.before), (0.2, "after", summary.after)):
            heights = [getattr(column, opponent).points(outcome) for opponent, outcome in shown]
            right.bar([place + offset for place in range(4)], heights, 0.4, label=label)
        labels = [f"{outcome}\nvs {opponent}" for opponent, outcome in shown]
        right.set_xticks(range(4), labels, fontsize="small")
        right.set(title="evaluation, per cent of games", ylim=(0, 100))
        right.legend(fontsize="small")
    figure.savefig(path, dpi=120)
