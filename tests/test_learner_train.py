import json
import math
import os
import random
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from learner_world import (
    VOCABULARY,
    Attempt,
    World,
    make_base,
    make_sample,
    random_group,
    scores_under,
    settings,
)

from capture.adapters import read_manifest
from capture.errors import Fenced
from capture.types import EngineVersion, Version
from hone.presets import PRESETS
from learner import checkpoint
from learner.files import read_tensors
from learner.model import Model
from learner.settings import Settings
from learner.train import run


def never() -> bool:
    return False


def run_killed_at(point: str, config: Settings, world: World) -> None:
    """Run a learner in a child process that gets SIGKILL when it reaches `point`."""

    def on_point(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            run(config, world.path, world.run_id, world.policy, never, on_point)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    name = f"learner:{world.policy}"  # the lease would run out by itself in 5 s
    world.store.release_lease(name, world.store.live_leases(name)[name])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


def world_with(path: Path, groups: int, seed: int = 0) -> World:
    world = World(path)
    rng = random.Random(seed)
    for _ in range(groups):
        world.add_group(random_group(rng))
    return world


def newest(world: World) -> Version:
    return world.store.versions(world.policy)[-1]


def weights(version: Version) -> dict[str, torch.Tensor]:
    assert version.path is not None
    return read_tensors(Path(version.path) / "adapter_model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_two_batches_are_committed_published_and_counted(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 4)
    config = settings(base, tmp_path, steps_max=2, steps_path=str(tmp_path / "steps.jsonl"))
    run(config, world.path, world.run_id, world.policy, never)
    versions = world.store.versions(world.policy)
    assert [(v.version, v.state, v.step) for v in versions] == [
        (0, "active", 0),
        (1, "published", 1),
        (2, "published", 2),
    ]
    balance = world.store.balance(world.policy)
    assert balance.exact
    assert balance.trained > 0
    assert balance.pending == 0
    assert world.store.ledger_twice() == 0
    assert world.store.verify() == []
    first, second = world.store.steps(world.run_id)
    assert first.metrics["reward_mean"] == pytest.approx(0.75)  # rewards 0 1 2 0 in every group
    assert first.metrics["score_win"] == pytest.approx(0.75)
    assert first.metrics["advantage_abs_max"] == pytest.approx(1.25)
    assert first.metrics["trained_tokens"] + second.metrics["trained_tokens"] == balance.trained
    assert (first.metrics["staleness_max"], second.metrics["staleness_max"]) == (0.0, 1.0)
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line["version"]) for line in lines] == [(1, 1), (2, 2)]
    manifest = read_manifest(tmp_path / "adapters" / "policy@v2")
    assert (manifest.parent, manifest.step, manifest.lora_rank) == (1, 2, 4)
    assert len(manifest.canary_logprobs) == len(manifest.canary_ids) - 1
    moved = zip(manifest.canary_logprobs, manifest.parent_logprobs, strict=True)
    assert sum(abs(a - b) for a, b in moved) > 1e-3


def test_ledger_says_what_became_of_each_rollout(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    # centred: 1, 0, -1: the middle one has tokens that no gradient touches
    members = world.add_group([Attempt([5, 6], [[7, 8, 9]], reward) for reward in (2.0, 1.0, 0.0)])
    run(settings(base, tmp_path, steps_max=1), world.path, world.run_id, world.policy, never)
    balance = world.store.balance(world.policy)
    assert (balance.trained, balance.zero_advantage) == (6, 3)
    assert {world.store.rollout(id).state for id in members} == {"trained"}
    assert world.store.steps(world.run_id)[0].metrics["trained_tokens"] == 6.0


def test_an_all_zero_batch_commits_without_step_or_version(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    world.add_group([Attempt([5, 6], [[7]], 0.1) for _ in range(3)])
    config = settings(base, tmp_path, steps_path=str(tmp_path / "steps.jsonl"))
    run(config, world.path, world.run_id, world.policy, lambda: (tmp_path / "steps.jsonl").exists())
    assert [v.version for v in world.store.versions(world.policy)] == [0]
    assert [(row.step, row.version) for row in world.store.steps(world.run_id)] == [(0, 0)]
    balance = world.store.balance(world.policy)
    assert (balance.trained, balance.zero_advantage, balance.exact) == (0, 3, True)
    assert not (tmp_path / "checkpoints").exists()


def test_resume_is_bit_exact(base: Path, tmp_path: Path) -> None:
    whole = world_with(tmp_path / "whole.db", 6)
    run(settings(base, tmp_path / "a", steps_max=3), whole.path, whole.run_id, whole.policy, never)
    parts = world_with(tmp_path / "parts.db", 6)
    for steps in (1, 2, 3):
        config = settings(base, tmp_path / "b", steps_max=steps, seed=42 if steps == 1 else 1000 + steps)
        run(config, parts.path, parts.run_id, parts.policy, never)
    assert same(weights(newest(whole)), weights(newest(parts)))
    a, b = whole.store.steps(whole.run_id), parts.store.steps(parts.run_id)
    assert [row.metrics["loss"] for row in a] == [row.metrics["loss"] for row in b]
    ends = [checkpoint.load(Path(w.store.lineage(w.run_id).checkpoint or "")) for w in (whole, parts)]
    assert same(ends[0].optimizer, ends[1].optimizer)


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "gspo"])
def test_a_paper_s_preset_trains(base: Path, tmp_path: Path, name: str) -> None:
    world = world_with(tmp_path / "db", 4)
    config = settings(
        base, tmp_path, steps_max=4, minibatches=2, micro_batch_tokens=20, **PRESETS[name]["train"]
    )
    run(config, world.path, world.run_id, world.policy, never)
    assert [version.step for version in world.store.versions(world.policy)] == [0, 2, 4]
    assert all(row.metrics["grad_norm"] > 0 for row in world.store.steps(world.run_id))
    assert world.store.balance(world.policy).exact
    assert world.store.verify() == []


def test_the_reference_moves_every_so_many_steps_and_survives_a_restart(base: Path, tmp_path: Path) -> None:
    changes = {"kl_coef": 0.5, "ref_refresh_steps": 2}
    whole = world_with(tmp_path / "whole.db", 8)
    run(settings(base, tmp_path / "a", steps_max=4, **changes), whole.path, whole.run_id, whole.policy, never)
    kls = [row.metrics["kl"] for row in whole.store.steps(whole.run_id)]
    assert [kl > 1e-9 for kl in kls] == [False, True, False, True]  # from itself it is not far
    still = world_with(tmp_path / "still.db", 8)
    run(settings(base, tmp_path / "c", steps_max=4, kl_coef=0.5), still.path, still.run_id, "policy", never)
    assert [row.metrics["kl"] > 1e-9 for row in still.store.steps(still.run_id)] == [False, True, True, True]
    parts = world_with(tmp_path / "parts.db", 8)
    for steps in (1, 2, 3, 4):
        config = settings(base, tmp_path / "b", steps_max=steps, **changes)
        run(config, parts.path, parts.run_id, parts.policy, never)
    assert same(weights(newest(whole)), weights(newest(parts)))
    assert not same(weights(newest(whole)), weights(newest(still)))


def committed(world: World, batches: int) -> bool:
    return len(world.store.steps(world.run_id)) == batches


def test_learning_rate_follows_from_the_lineage_s_steps_across_a_restart(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 6)
    config = settings(base, tmp_path, lr=0.01, lr_schedule="linear", steps_max=8, minibatches=2)
    for batches in (1, 2):
        stop = partial(committed, world, batches)
        run(config, world.path, world.run_id, world.policy, stop)
    rates = [(row.step, row.metrics["lr"]) for row in world.store.steps(world.run_id)]
    assert rates == [(2, pytest.approx(0.01 * (1 - 0.5 / 8))), (4, pytest.approx(0.01 * (1 - 2.5 / 8)))]


@pytest.mark.parametrize("point", ["before_commit", "after_checkpoint", "after_commit", "mid_publish"])
def test_a_kill_at_any_point_loses_and_repeats_nothing(base: Path, tmp_path: Path, point: str) -> None:
    whole = world_with(tmp_path / "whole.db", 4)
    run(settings(base, tmp_path / "a", steps_max=2), whole.path, whole.run_id, whole.policy, never)
    crashed = world_with(tmp_path / "crashed.db", 4)
    config = settings(base, tmp_path / "b", steps_max=2)
    run_killed_at(point, config, crashed)
    committed = point in ("after_commit", "mid_publish")
    states = [v.state for v in crashed.store.versions(crashed.policy)]
    assert states == (["active", "committed"] if committed else ["active"])
    assert not (tmp_path / "b" / "adapters" / "policy@v1").exists()
    run(config, crashed.path, crashed.run_id, crashed.policy, never)
    assert [v.state for v in crashed.store.versions(crashed.policy)] == ["active", "published", "published"]
    assert crashed.store.ledger_twice() == 0
    assert crashed.store.balance(crashed.policy) == whole.store.balance(whole.policy)
    assert same(weights(newest(whole)), weights(newest(crashed)))
    assert len(list((tmp_path / "b" / "checkpoints").iterdir())) == 2  # no orphan is left
    names = [path.name for path in (tmp_path / "b" / "adapters").iterdir()]
    assert sorted(names) == ["policy@v1", "policy@v2"]


def test_publishing_again_finds_the_finished_directory(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 2)
    config = settings(base, tmp_path, steps_max=1)
    run_killed_at("mid_publish", config, world)
    left = tmp_path / "adapters" / ".tmp-policy@v1"
    complete = shutil.copytree(left, tmp_path / "adapters" / "policy@v1")  # as if killed after the rename
    before = (complete / "manifest.json").stat().st_mtime_ns
    run(config, world.path, world.run_id, world.policy, never)
    assert (complete / "manifest.json").stat().st_mtime_ns == before
    assert newest(world).state == "published"
    assert newest(world).sha256 == read_manifest(complete).sha256
    assert not left.exists()


def test_a_nonfinite_batch_is_dropped_and_leaves_no_trace_in_the_weights(base: Path, tmp_path: Path) -> None:
    worlds = []
    for name, poisoned in (("clean", False), ("poisoned", True)):
        world = World(tmp_path / f"{name}.db")
        if poisoned:
            group = random_group(random.Random(9))
            group[0].logprobs = [[-1000.0] * len(turn) for turn in group[0].turns]  # ratio: infinite
            for attempt in group:
                attempt.reward *= 1e38
            world.add_group(group)
        world.add_group(random_group(random.Random(1)))
        config = settings(base, tmp_path / name, steps_max=1, groups_per_batch=1)
        run(config, world.path, world.run_id, world.policy, never)
        worlds.append(world)
    clean, poisoned_world = worlds
    assert same(weights(newest(clean)), weights(newest(poisoned_world)))
    assert set(poisoned_world.store.balance("policy").dropped) == {"nonfinite"}
    assert poisoned_world.store.balance("policy").exact


def test_told_to_stop_in_the_middle_it_abandons_the_batch(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 2)
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2  # once before the batch, once before its first micro-batch

    config = settings(base, tmp_path, steps_max=1, micro_batch_tokens=16)
    run(config, world.path, world.run_id, world.policy, should_stop)
    assert [v.version for v in world.store.versions(world.policy)] == [0]
    assert world.store.counts(world.run_id).batches == {"taken": 1}
    run(config, world.path, world.run_id, world.policy, never)
    assert newest(world).state == "published"
    assert world.store.counts(world.run_id).batches == {"committed": 1}


def test_a_fenced_learner_stops_without_committing(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 2)

    def lose_lease(point: str) -> None:
        if point == "after_checkpoint":  # paused past its lease; another one starts
            name = f"learner:{world.policy}"
            world.store.release_lease(name, world.store.live_leases(name)[name])
            assert world.store.acquire_lease(name, "the other", 5.0) is not None

    config = settings(base, tmp_path, steps_max=1)
    with pytest.raises(Fenced):
        run(config, world.path, world.run_id, world.policy, never, lose_lease)
    assert [v.version for v in world.store.versions(world.policy)] == [0]
    assert world.store.counts(world.run_id).batches == {"taken": 1}


def test_a_second_learner_is_refused(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 2)
    assert world.store.acquire_lease("learner:policy", "the first", 60.0) == 1
    with pytest.raises(Fenced, match="another learner"):
        run(settings(base, tmp_path, lease_wait_s=0.3), world.path, world.run_id, world.policy, never)


def test_a_later_run_goes_on_from_the_version_it_starts_at(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 2)
    run(settings(base, tmp_path, steps_max=1), world.path, world.run_id, world.policy, never)
    first = newest(world)
    row = EngineVersion(engine="e", policy=world.policy, version=1, state="verified")
    world.store.record_engine_version(row)
    epoch = world.store.acquire_lease("activator", "test", 60.0)
    assert epoch is not None
    world.store.activate(world.policy, 1, epoch)
    later = World(world.path, run_id="later", start_version=1, made=world.made)
    later.add_group([attempt.at_version(1) for attempt in random_group(random.Random(5))])
    run(settings(base, tmp_path, steps_max=1, lr=0.0), later.path, "later", later.policy, never)
    assert (newest(later).version, newest(later).parent, newest(later).lineage) == (2, 1, "l_later")
    assert same(weights(first), weights(newest(later)))


def test_mismatch_is_zero_for_the_truth_and_not_for_a_wrong_adapter(base: Path, tmp_path: Path) -> None:
    world = World(tmp_path / "db")
    sampler = Model(settings(base, tmp_path))
    rng = random.Random(0)
    for step in range(3):
        version = newest(world)
        adapter = weights(version) if version.version else None
        group = [a.sampled_by(sampler, adapter, version.version, 0.7) for a in random_group(rng)]
        world.add_group(group)
        limited = settings(base, tmp_path, groups_per_batch=1, steps_max=step + 1)
        run(limited, world.path, world.run_id, world.policy, never)
    rows = [row.metrics for row in world.store.steps(world.run_id)]
    assert all(row["mismatch_tokens"] >= 0.05 * row["trained_tokens"] for row in rows)
    assert max(row["mismatch_max"] for row in rows) < 1e-5
    assert "mismatch_wrong_adapter_max" not in rows[0]  # version 0 has no other to be mistaken for
    assert all(row["mismatch_wrong_adapter_max"] > 1e-2 for row in rows[1:])
    assert all(row["ratio_max"] == pytest.approx(1.0, abs=1e-5) for row in rows)


def test_old_checkpoints_are_pruned_but_for_every_nth(base: Path, tmp_path: Path) -> None:
    world = world_with(tmp_path / "db", 7)
    config = settings(
        base, tmp_path, groups_per_batch=1, steps_max=7, save_every=3, keep_last=2, staleness_max=9
    )
    run(config, world.path, world.run_id, world.policy, never)
    steps = sorted(checkpoint.step_of(path) for path in (tmp_path / "checkpoints").iterdir())
    assert steps == [3, 6, 7]


def bandit(base: Path, tmp_path: Path, **changes: object) -> tuple[World, list[float]]:
    """Training on a bandit over the vocabulary that the newest version samples; how likely it took a good
    arm at each step."""
    world = World(tmp_path / "db")
    sampler = Model(settings(base, tmp_path))
    rng = random.Random(0)
    prompt, good = [5, 6, 7], {11, 12, 13, 14}
    chances: list[float] = []

    def play() -> bool:
        """Whatever was trained is published: sample the next group from it."""
        version = newest(world)
        if version.state != "committed" and not world.store.outstanding_groups(world.run_id):
            adapter = weights(version) if version.version else None
            table = scores_under(
                sampler, adapter, [make_sample([*prompt, arm], [3]) for arm in range(VOCABULARY)]
            )
            chances.append(sum(math.exp(table[arm]) for arm in good))
            group = []
            for arm in rng.choices(range(VOCABULARY), [math.exp(x) for x in table], k=16):
                attempt = Attempt(prompt, [[arm]], float(arm in good))
                attempt.logprobs, attempt.version = [[table[arm]]], version.version
                group.append(attempt)
            world.add_group(group)
        return False

    config = settings(base, tmp_path, groups_per_batch=1, **changes)
    run(config, world.path, world.run_id, world.policy, play)
    return world, chances


def test_it_finds_the_best_arm(base: Path, tmp_path: Path) -> None:
    world, chances = bandit(base, tmp_path, steps_max=15, lr=0.03)
    assert chances[0] < 0.25
    assert chances[-1] > 0.9
    rows = [row.metrics for row in world.store.steps(world.run_id)]
    assert max(row["staleness_max"] for row in rows) == 0.0
    assert max(row["mismatch_max"] for row in rows) < 1e-5
    assert not any(row.get("kl") for row in rows)


def test_a_penalty_holds_it_back(base: Path, tmp_path: Path) -> None:
    """The best policy for E[reward] - b KL(π | ref) is ref · exp(reward / b) / Z: not certain for b = 1."""
    world, chances = bandit(base, tmp_path, steps_max=15, lr=0.03, kl_coef=1.0)
    tilted = chances[0] * math.e
    best = tilted / (tilted + 1 - chances[0])
    assert max(chances) < best + 0.25 < 0.9
    rows = [row.metrics for row in world.store.steps(world.run_id) if "kl" in row.metrics]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert all(row["kl"] > 0 for row in rows[1:])
