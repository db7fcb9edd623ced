"""Memory that is too small and a disk that is full: training goes on, and nothing is lost or done twice."""

import errno
import json
import logging
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from learner_world import Attempt, World, make_base, settings
from test_learner_train import never, newest, same, weights, world_with

from capture.errors import ConfigError, StoreError
from capture.evaluations import Evaluation, record
from capture.sqlite import SqliteStore
from learner import checkpoint
from learner.batch import MicroBatch
from learner.lease import Lease
from learner.metrics import Metrics
from learner.model import Model
from learner.settings import Settings
from learner.train import Learner, no_point, run
from learner.trouble import disk_full, halved, out_of_memory

ROOT = Path(__file__).parent.parent
SPARE_BYTES = 96 << 20  # too little for 26,000 tokens at once, enough for a part of them


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def test_what_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not out_of_memory(RuntimeError("shapes differ"))


def test_micro_batches_are_halved_until_every_sample_goes_alone() -> None:
    assert halved(2048, [300, 400]) == 350  # there never were more than 700 tokens
    assert halved(350, [300, 400]) == 300
    assert halved(300, [300, 400]) is None


def test_what_counts_as_a_full_disk(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / "db")) as store:
        store._db.execute("PRAGMA max_page_count = 1").fetchall()
        with pytest.raises(StoreError) as caught:
            store.put_metrics("run", "kind", {"text": "x" * 1_000_000})
    assert disk_full(caught.value)
    assert disk_full(OSError(errno.ENOSPC, "No space left on device"))
    assert not disk_full(OSError(errno.EACCES, "Permission denied"))
    assert not disk_full(StoreError("the store failed: no such table"))


class Small(Model):
    """A model on a device that holds `nodes_max` tokens at once."""

    def __init__(self, config: Settings, nodes_max: int) -> None:
        super().__init__(config)
        self.nodes_max = nodes_max
        self.passes: list[int] = []  # tokens of each

    def logprobs(self, micro: MicroBatch) -> torch.Tensor:
        self.passes.append(len(micro.token_ids))
        if torch.is_grad_enabled() and len(micro.token_ids) > self.nodes_max:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().logprobs(micro)


def learn(config: Settings, world: World, model: Model, turns: int) -> tuple[Learner, Metrics]:
    """So many turns of the loop with this model."""
    with (
        Lease(world.path, world.policy, 0.0, never) as lease,
        Metrics("127.0.0.1", None, None) as metrics,
        closing(SqliteStore(world.path)) as store,
    ):
        learner = Learner(config, model, store, lease, metrics, world.run_id, never, no_point)
        for _ in range(turns):
            learner.turn()
    return learner, metrics


def test_out_of_memory_halves_the_micro_batches_for_good(base: Path, tmp_path: Path) -> None:
    plenty, short = (world_with(tmp_path / name, 4) for name in ("plenty.db", "short.db"))
    changes = {"micro_batch_tokens": 4096, "passes": 2, "mismatch_fraction": 0.0, "lr": 1e-3}
    learn(settings(base, tmp_path / "a", **changes), plenty, Small(settings(base, tmp_path), 9999), 2)
    model = Small(settings(base, tmp_path), 60)
    learner, metrics = learn(settings(base, tmp_path / "b", **changes), short, model, 2)
    assert learner.settings.micro_batch_tokens <= 60
    splits = metrics.registry.get_sample_value("hone_learner_memory_splits_total")
    assert splits is not None
    failed = [at for at, nodes in enumerate(model.passes) if nodes > 60]
    assert len(failed) >= splits > 0
    assert [v.step for v in short.store.versions("policy")] == [0, 2, 4]
    assert short.store.balance("policy") == plenty.store.balance("policy")
    for name, tensor in weights(newest(plenty)).items():
        torch.testing.assert_close(weights(newest(short))[name], tensor, rtol=0, atol=2e-5)


def test_a_sample_that_fits_nowhere_drops_its_batch_and_leaves_the_weights(
    base: Path, tmp_path: Path
) -> None:
    world = world_with(tmp_path / "db", 2)
    learner, _ = learn(settings(base, tmp_path), world, Small(settings(base, tmp_path), 3), 1)
    balance = world.store.balance("policy")
    assert (set(balance.dropped), balance.trained, balance.exact) == ({"out_of_memory"}, 0, True)
    assert same(learner.hold.model.adapter(), learner.hold.head.adapter)
    assert world.store.verify() == []


def limited(config: Settings, store: Path, run_id: str, policy: str, spare_bytes: int, log: Path) -> None:
    """Run a learner that may map only so much more than it has once its model is loaded."""
    resource_limits: list[int] = []

    def should_stop() -> bool:
        if not resource_limits:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource_limits.append(used + spare_bytes)
            resource.setrlimit(resource.RLIMIT_AS, (used + spare_bytes, resource.RLIM_INFINITY))
        return False

    logging.basicConfig(filename=log, force=True)
    run(config, store, run_id, policy, should_stop)


def test_in_a_process_that_really_has_too_little_memory(base: Path, tmp_path: Path) -> None:
    world = wide_world(tmp_path / "db")
    config = settings(base, tmp_path, steps_max=1, micro_batch_tokens=1 << 20, mismatch_fraction=0.0, lr=1e-4)
    log = tmp_path / "log"
    fresh = multiprocessing.get_context("spawn")  # what this process has freed would be memory to spare
    child = fresh.Process(
        target=limited, args=(config, world.path, world.run_id, world.policy, SPARE_BYTES, log)
    )
    child.start()
    child.join()
    assert child.exitcode == 0, log.read_text()
    assert "out of memory: micro-batches of" in log.read_text()
    assert newest(world).state == "published"
    assert world.store.balance("policy").dropped == {}


def wide_world(path: Path) -> World:
    """Rollouts that share nothing, of 400 tokens each."""
    world = World(path)
    for first in (5, 6):
        prompts = [[first, member, *(7 + i % 50 for i in range(400))] for member in range(2, 34)]
        world.add_group([Attempt(prompt, [[8, 9, 10]], float(prompt[1] % 3)) for prompt in prompts])
    return world


class FullDisk:
    """From a point of the loop on no file may grow past `bytes_max`, until the learner has waited."""

    def __init__(self, point: str, bytes_max: int, looks: int = 5) -> None:
        self._point, self._bytes_max, self._looks = point, bytes_max, looks
        self._free = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.full = False
        self.times = 0

    def on_point(self, point: str) -> None:
        if point == self._point and not self.times:
            self.full = True
            self.times += 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._bytes_max, self._free[1]))

    def should_stop(self) -> bool:
        """Looked at while the learner waits."""
        self._looks -= self.full
        if self._looks == 0:
            self.clear()
        return False

    def clear(self) -> None:
        self.full = False
        resource.setrlimit(resource.RLIMIT_FSIZE, self._free)


@pytest.mark.parametrize("point", ["before_commit", "after_commit"])
def test_a_full_disk_only_delays(base: Path, tmp_path: Path, point: str) -> None:
    whole, full = (world_with(tmp_path / name, 4) for name in ("whole.db", "full.db"))
    run(settings(base, tmp_path / "a", steps_max=2), whole.path, whole.run_id, whole.policy, never)
    disk = FullDisk(point, 2000)
    lines = tmp_path / "steps.jsonl"
    config = settings(base, tmp_path / "b", steps_max=2, steps_path=str(lines), disk_retry_s=0.2)
    try:
        run(config, full.path, full.run_id, full.policy, disk.should_stop, disk.on_point)
    finally:
        disk.clear()
    assert disk.times == 1
    assert [v.state for v in full.store.versions(full.policy)] == ["active", "published", "published"]
    assert full.store.ledger_twice() == 0
    assert full.store.balance(full.policy) == whole.store.balance(whole.policy)
    assert same(weights(newest(whole)), weights(newest(full)))
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == [1, 2]
    left = [path.name for place in ("checkpoints", "adapters") for path in (tmp_path / "b" / place).iterdir()]
    assert not [name for name in left if name.startswith(".tmp")]
    assert len(left) == 4


def test_what_was_undone_can_be_undone_again(base: Path, tmp_path: Path) -> None:
    """The steps after an undo move nothing that the next undo goes back to."""
    model = Model(settings(base, tmp_path))
    optimizer = torch.optim.AdamW(model.parameters.values())

    def step() -> None:
        for parameter in model.parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    step()
    held = checkpoint.optimizer_tensors(optimizer, model.parameters)
    before = {name: tensor.clone() for name, tensor in held.items()}
    for _ in range(2):
        checkpoint.restore_optimizer(optimizer, model.parameters, held)
        step()
        assert same(held, before)


def test_sigterm_in_the_middle_of_a_step_abandons_it(base: Path, tmp_path: Path) -> None:
    """The process that `hone learn` is: told to stop, it ends by itself, and the batch is as it was."""
    world = wide_world(tmp_path / "db")
    text = (
        f"[policy]\nbase_model = '{base}'\n[run]\ndir = '{tmp_path}'\n[capture]\npath = '{world.path}'\n"
        "[train]\nlora_rank = 4\nmetrics_port = 0\nmicro_batch_tokens = 410\npasses = 1000\n"
        "groups_per_batch = 1\n"
    )
    (tmp_path / "hone.toml").write_text(text)
    command = [
        sys.executable,
        "-m",
        "hone.cli.main",
        "learn",
        "--run",
        "run",
        "-c",
        str(tmp_path / "hone.toml"),
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=environ)
    try:
        deadline = time.monotonic() + 120
        while world.store.counts("run").batches != {"taken": 1}:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.5)  # some micro-batches of its thousands
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert world.store.counts("run").batches == {"taken": 1}
    assert [v.version for v in world.store.versions("policy")] == [0]
    assert not world.store.live_leases("learner:policy")
    assert world.store.verify() == []


def test_another_base_or_another_scale_is_not_gone_on_from(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 4)
    run(settings(base, tmp_path, steps_max=1), world.path, world.run_id, world.policy, never)
    other = make_base(tmp_path / "other", seed=2)
    with pytest.raises(ConfigError, match=r"policy\.base_model: policy@v1 was trained on another model"):
        run(settings(other, tmp_path, steps_max=2), world.path, world.run_id, world.policy, never)
    with pytest.raises(ConfigError, match=r"train\.lora_alpha: policy@v1 has 4 at rank 4"):
        run(settings(base, tmp_path, steps_max=2, lora_alpha=8.0), world.path, "run", world.policy, never)
    run(settings(base, tmp_path, steps_max=2), world.path, world.run_id, world.policy, never)
    assert newest(world).version == 2


def test_the_best_checkpoint_by_evaluation_stays(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 7)
    rewards = {1: 0.2, 2: 0.9, 4: 0.5}

    def evaluate() -> bool:
        version = newest(world).version
        if version in rewards:
            found = Evaluation(
                version=version, scenarios="eval", reward=rewards.pop(version), rollouts=[], at=0.0
            )
            record(world.store, world.run_id, found)
        return False

    config = settings(
        base, tmp_path, groups_per_batch=1, steps_max=7, save_every=50, keep_last=2, staleness_max=9
    )
    run(config, world.path, world.run_id, world.policy, evaluate)
    steps = sorted(checkpoint.step_of(path) for path in (tmp_path / "checkpoints").iterdir())
    assert steps == [2, 6, 7]
