"""Other places for a batch's numbers."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from learner_world import World, make_base, settings
from test_learner_train import never, world_with

from capture.errors import ConfigError
from learner.sinks import Sinks, imported, opened
from learner.train import run


class Kept:
    """A sink that keeps what it was given; told to, it breaks."""

    def __init__(self, breaks: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False
        self._breaks = breaks

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._breaks:
            raise ConnectionError("the page cannot be reached")
        self.rows.append((step, dict(numbers)))

    def close(self) -> None:
        self.closed = True


def test_one_that_fails_is_counted_and_the_others_go_on() -> None:
    broken, kept, failed = Kept(breaks=True), Kept(), list[str]()
    sinks = Sinks({"wandb": broken, "tensorboard": kept}, failed.append)
    sinks.write(1, {"loss": 0.5})
    sinks.write(2, {"loss": 0.25})
    sinks.close()
    assert failed == ["wandb", "wandb"]
    assert kept.rows == [(1, {"loss": 0.5}), (2, {"loss": 0.25})]
    assert broken.closed
    assert kept.closed


def test_a_missing_library_names_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"train\.sinks: .*no_such_library.*pip install 'hone\[wandb\]'"):
        imported("no_such_library", "wandb")


def test_what_a_library_says_at_its_start_is_told(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(ConfigError, match=r"train\.sinks: tensorboard: \w+Error: "):
        opened(["tensorboard"], "run", "hone", tmp_path, print)


def test_tensorboard_has_every_batch_of_a_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    world: World = world_with(tmp_path / "db", 4)
    base = make_base(tmp_path / "base")
    config = settings(base, tmp_path, steps_max=2, sinks=["tensorboard"], sinks_dir=str(tmp_path))
    run(config, world.path, world.run_id, world.policy, never)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "hone" / "run"))
    events.Reload()
    stored = [(row.step, row.metrics["loss"]) for row in world.store.steps("run")]
    assert [(one.step, pytest.approx(one.value)) for one in events.Scalars("loss")] == stored
    assert "reward_mean" in events.Tags()["scalars"]
