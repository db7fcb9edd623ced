"""How a policy and its runs begin: an adapter as version 0, and a new run from a version."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from learner_world import World, make_base, make_sample, random_group, scores_under, settings
from lora_engine import LoraEngine, canary
from proxy_world import USER, engine_settings, until, world, write_manifest

from capture.adapters import read_manifest
from capture.errors import ConfigError, Conflict, NotFound
from capture.sqlite import SqliteStore
from capture.types import EngineVersion, Rollout
from hone.config import Config, load
from hone.start import begin, start_policy, start_run
from learner.files import read_tensors
from learner.lessons import lesson
from learner.model import Model
from learner.sft import SftSettings
from learner.sft import run as fine_tune
from learner.train import run

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def sft(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that was taught to count."""
    scratch = tmp_path_factory.mktemp("sft")
    rng = random.Random(0)
    firsts = [rng.randrange(8, 60) for _ in range(40)]
    lessons = [lesson(str(n), make_sample([2, n, n + 1, n + 2], [2, 3])) for n in firsts]
    taught = SftSettings(epochs=2, lr=2e-2, batch_tokens=64)
    config = settings(base, scratch)
    fine_tune(config, taught, "somebody", lessons, scratch / "sft", lambda: False, lambda progress: None)
    return scratch / "sft"


@pytest.fixture
def configured(base: Path, tmp_path: Path) -> Callable[..., Config]:
    def made(train: str = "", rank: int = 4) -> Config:
        path = tmp_path / "hone.toml"
        path.write_text(
            f"[policy]\nbase_model = '{base}'\n[run]\ndir = '{tmp_path}'\n[rewards]\nscript = 'reward.py'\n"
            f"[train]\nlora_rank = {rank}\n{train}\n"
        )
        return load(path, {})

    return made


def opened(config: Config) -> SqliteStore:
    return SqliteStore(Path(config.store.path))


def test_version_0_is_a_copy_where_engines_see_it(
    configured: Callable[..., Config], sft: Path, tmp_path: Path
) -> None:
    config = configured(f"init_adapter = '{sft}'")
    store = opened(config)
    begin(config, store, "run", None)
    (zero,) = store.versions("policy")
    final = tmp_path / "adapters" / "policy@v0"
    assert (zero.version, zero.state, zero.path, zero.lineage) == (0, "active", str(final), "l_run")
    manifest, source = read_manifest(final), read_manifest(sft)
    assert (manifest.policy, manifest.version, manifest.parent) == ("policy", 0, None)
    assert manifest.sha256 == source.sha256 == zero.sha256
    assert manifest.canary_logprobs == source.canary_logprobs != manifest.parent_logprobs
    assert begin(config, store, None, None) == "run"  # again: the same one
    assert start_run(configured(), store, "run").start_version == 0  # a part that was not told
    assert store.verify() == []
    shutil.rmtree(final)
    store.close()


def test_what_cannot_be_version_0_is_said(
    configured: Callable[..., Config], sft: Path, tmp_path: Path
) -> None:
    config = configured()
    store = opened(config)
    with pytest.raises(ConfigError, match=r"train\.init_adapter: .*nowhere is no adapter that `hone sft`"):
        begin(config, store, None, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"train\.lora_rank is 8, but .*sft has 4"):
        begin(configured(rank=8), store, None, str(sft))
    with pytest.raises(ConfigError, match=r"train\.lora_alpha is 16, but"):
        begin(configured("lora_alpha = 16"), store, None, str(sft))
    with pytest.raises(ConfigError, match=r"--from .*: train\.init_adapter is .*; version 0 can be one of"):
        begin(configured("init_adapter = 'elsewhere'"), store, None, str(sft))
    assert store.versions("policy") == []
    start_run(config, store, "run")
    with pytest.raises(ConfigError, match=r"train\.init_adapter: version 0 of policy is the base model"):
        begin(config, store, None, str(sft))
    store.close()


def test_not_once_the_base_has_answered_as_version_0(configured: Callable[..., Config], sft: Path) -> None:
    config = configured()
    store = opened(config)
    store.open_rollout(Rollout(id="r_1", key_id="k", mode="observe", policy="policy", policy_version=0))
    with pytest.raises(Conflict, match="the base model has answered as policy@v0 already"):
        start_policy(config, store, str(sft))
    store.close()


def test_training_goes_on_from_it_and_measures_from_it(
    base: Path, configured: Callable[..., Config], sft: Path, tmp_path: Path
) -> None:
    """The first version is a step from the adapter; the KL begins at 0, where that to the base would not."""
    config = configured(f"init_adapter = '{sft}'")
    store = opened(config)
    begin(config, store, "run", None)
    store.close()
    ours = settings(base, tmp_path, kl_coef=0.1, lr=1e-6, steps_max=1, groups_per_batch=1)
    sampler, start = Model(ours), read_tensors(sft / "adapter_model.safetensors")
    on = World(Path(config.store.path))
    group = random_group(random.Random(1))
    on.add_group([attempt.sampled_by(sampler, start, 0, 1.0) for attempt in group])
    run(ours, on.path, "run", "policy", lambda: False)
    first = on.store.versions("policy")[1]
    assert (first.state, first.parent, first.distance) == ("published", 0, 1)
    trained = read_tensors(Path(first.path or "") / "adapter_model.safetensors")
    for name, tensor in start.items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=1e-5)
    (row,) = on.store.steps("run")
    assert row.metrics["mismatch_max"] < 1e-5
    assert row.metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    sample = make_sample([2, 9, 10, 11], [2, 3])
    assert abs(scores_under(sampler, start, [sample])[0] - scores_under(sampler, None, [sample])[0]) > 0.1


async def test_engines_prove_it_and_serve_it_as_version_0(tmp_path: Path) -> None:
    path = tmp_path / "policy@v0"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"taught")
    sha256 = write_manifest(path, 0, child=canary(3), parent=canary(0), base=canary(0))
    async with LoraEngine().listening() as engine:
        store = SqliteStore(tmp_path / "hone.db")
        store.start_policy("policy", str(path), sha256)
        store.start_run("run", "policy", {})
        store.close()
        async with world(engine_settings(engine.url), tmp_path) as on:
            body = {"model": "policy", "messages": [USER]}
            status, answer, headers = await on.post(CHAT, body)
            assert (status, headers["x-hone-policy-version"]) == (200, "0"), answer
            opened = await on.opened(mode="eval", policy_version=0)
            assert (await on.post(f"/rollouts/{opened['id']}{CHAT}", body))[0] == 200
            assert engine.answered == ["policy@v0", "policy@v0"]  # never policy@base
            engine.restart()
            await until(lambda: engine.loads == ["policy@v0", "policy@v0"])
            assert (await on.post(CHAT, body))[0] == 200
            assert engine.answered[-1] == "policy@v0"


async def test_a_wrong_version_0_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "policy@v0"
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(b"taught")
    sha256 = write_manifest(path, 0, child=canary(3), parent=canary(0), base=canary(0))
    async with LoraEngine().listening() as engine:
        engine.parents.add("policy@v0")  # it answers with the base's weights under that name
        store = SqliteStore(tmp_path / "hone.db")
        store.start_policy("policy", str(path), sha256)
        store.start_run("run", "policy", {})
        async with world(engine_settings(engine.url), tmp_path) as on:
            await until(lambda: [one.state for one in store.engine_versions("policy")] == ["failed"])
            status, answer, _ = await on.post(CHAT, {"model": "policy", "messages": [USER]})
            assert status == 503, answer
            assert engine.answered == []
        store.close()


def trained(base: Path, config: Config) -> World:
    """A run with versions 1 and 2, the second active; a group is left over."""
    on = World(Path(config.store.path))
    for seed in (1, 2, 3):
        on.add_group(random_group(random.Random(seed)))
    ours = settings(base, Path(config.run.dir), groups_per_batch=1, steps_max=2)
    run(ours, on.path, "run", "policy", lambda: False)
    epoch = on.store.acquire_lease("activator", "test", 60.0)
    assert epoch is not None
    for version in (1, 2):
        on.store.record_engine_version(
            EngineVersion(engine="e", policy="policy", version=version, state="verified")
        )
        on.store.activate("policy", version, epoch)
    return on


def test_a_new_run_from_a_version_ends_the_one_before(base: Path, configured: Callable[..., Config]) -> None:
    config = configured()
    on = trained(base, config)
    assert begin(config, on.store, "again", "v1") == "again"
    lineage = on.store.lineage("again")
    assert (lineage.start_version, lineage.head_version, lineage.step, lineage.ended) == (1, 1, 0, False)
    active = on.store.active_version("policy")
    assert active is not None
    assert active.version == 1
    assert on.store.lineage("run").ended
    assert on.store.balance("policy").dropped.keys() == {"run_ended"}
    assert begin(config, on.store, None, None) == "again"
    later = World(on.path, run_id="again", start_version=1, made=on.made)
    later.add_group([attempt.at_version(1) for attempt in random_group(random.Random(5))])
    run(settings(base, Path(config.run.dir), steps_max=1), on.path, "again", "policy", lambda: False)
    newest = on.store.versions("policy")[-1]
    assert (newest.version, newest.parent, newest.lineage, newest.distance) == (3, 1, "l_again", 2)
    assert on.store.verify() == []


def test_a_new_run_is_refused_where_it_cannot_begin(base: Path, configured: Callable[..., Config]) -> None:
    config = configured()
    on = trained(base, config)
    with pytest.raises(NotFound, match="no version 7 that ever was active"):
        begin(config, on.store, "again", "policy@v7")
    with pytest.raises(ConfigError, match="run run exists: --from begins a new one"):
        begin(config, on.store, "run", "1")
    assert not on.store.lineage("run").ended
    on.store.acquire_lease("learner:policy", "somebody", 60.0)
    with pytest.raises(Conflict, match="--from v1: run run is being trained; stop it first"):
        begin(config, on.store, "again", "1")
