"""hone.toml: what is accepted, what is refused and in which words, what overrides what."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from capture.errors import ConfigError
from hone.config import Config, load, resolve
from hone.doctor import require
from hone.parts import serving
from hone.printing import redacted, to_toml
from hone.sections import SOURCES

ROOT = Path(__file__).parent.parent
FILE = Path("/somewhere/hone.toml")
POLICY = {"base_model": "org/model"}


def read(raw: dict[str, Any], environ: dict[str, str] | None = None) -> Config:
    return resolve({"policy": POLICY, **raw}, environ or {}, FILE, "cpu")


TOMLS = sorted(
    path
    for path in ROOT.rglob("*.toml")
    if ".venv" not in path.parts and "runs" not in path.parts and path.name != "pyproject.toml"
)


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_toml_of_the_repository_loads(path: Path) -> None:
    config = load(path, {}, "cpu")
    assert config.path == path
    assert config.policy.base_model


def test_there_are_tomls_to_load() -> None:
    names = {str(path.relative_to(ROOT)) for path in TOMLS}
    assert {"hone/template.toml", "examples/tictactoe/hone.toml"} <= names


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"polcy": {}}, "unknown section [polcy]; did you mean policy?"),
        ({"train": 3}, "train must be a section: [train]"),
        ({"train": {"learning_rate_x": 1}}, "unknown setting train.learning_rate_x"),
        ({"train": {"group_sise": 4}}, "unknown setting train.group_sise; did you mean train.group_size?"),
        ({"rewards": {"lr": 1e-4}}, "unknown setting rewards.lr; did you mean train.lr?"),
        ({"engine": {"adaptor_dir": "x"}}, "did you mean engine.adapter_dir?"),
        (
            {"proxy": {"limits": {"body_bytes": 1}}},
            "proxy.limits.body_bytes; did you mean proxy.limits.body_byt",
        ),
        ({"proxy": {"keys": [{"idd": "a"}]}}, "unknown setting proxy.keys.idd; did you mean proxy.keys.id?"),
        ({"routes": {"judge": {"ur": "http://x"}}}, 'unknown setting routes."judge".ur; did you mean'),
        ({"train": {"lr": "fast"}}, "train.lr: expected `float`, got `str`"),
        ({"train": {"group_size": 0}}, "train.group_size: expected `int` >= 1"),
        ({"engine": {"port": 70000}}, "engine.port: expected `int` <= 65535"),
        ({"routes": {"judge": {"url": 3}}}, "routes[...].url: expected `str | null`, got `int`"),
        ({"routes": {"judge": {}}}, 'routes."judge" needs exactly one of to, url and provider'),
        ({"train": {"staleness_max": 7}}, "engine.versions_max is 8; train.staleness_max = 7 needs 9"),
        ({"train": {"kl_coef": -0.1}}, "train.kl_coef: expected `float` >= 0"),
        (
            {"passive": {"group_size": 4}},
            "unknown setting passive.group_size; did you mean train.group_size?",
        ),
        ({"rewards": {"passive": {"train": True}}}, "unknown setting rewards.passive"),
        ({"train": {"base_model": "x"}}, "unknown setting train.base_model; did you mean policy.base_model?"),
    ],
)
def test_a_wrong_setting_is_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(raw)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[policy", "is not TOML"),
        ("[policy]\nbase_model_file = 'gone.txt'", "policy.base_model_file: cannot read"),
    ],
)
def test_a_file_that_cannot_be_read_says_so(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hone.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(path, {}, "cpu")
    with pytest.raises(ConfigError, match="does not exist; `hone init` writes one"):
        load(tmp_path / "other.toml", {}, "cpu")


def test_the_environment_overrides_the_file() -> None:
    environ = {
        "HONE_TRAIN__LR": "1e-3",
        "HONE_TRAIN__AGENT": "python play.py",
        "HONE_TRAIN__STEPS_MAX": "7",
        "HONE_REWARDS__SEAL__IDLE_S": "5",
        "HONE_ENGINE__URLS": '["http://a", "http://b"]',
        "HONE_EVAL__ENV": '{ TEMPERATURE = "0" }',
        "HONE_SUPERVISOR": "not a setting",
    }
    config = read({"train": {"lr": 5.0, "group_size": 3}}, environ)
    assert config.learner.lr == 1e-3
    assert config.learner.steps_max == 7
    assert config.rollouts.agent == "python play.py"
    assert config.rollouts.group_size == 3
    assert config.rewards.seal.idle_s == 5.0
    assert config.proxy.engines.urls == ("http://a", "http://b")
    assert config.rollouts.eval_env == {"TEMPERATURE": "0"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("HONE_TRAIN__LRR", "1", "HONE_TRAIN__LRR: unknown setting; did you mean train.lr?"),
        ("HONE_TRIAN__LR", "1", "HONE_TRIAN__LR: no section [trian] can be overridden; did you mean train?"),
        ("HONE_TRAIN__LR", "fast", "train.lr: expected `float`"),
        ("HONE_REWARDS__SEAL__IDLE", "1", "rewards.seal.idle: unknown setting; did you mean idle_s?"),
    ],
)
def test_a_wrong_override_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({}, {name: value})
    assert message in str(caught.value)


def test_a_secret_can_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("org/secret-model\n")
    path = tmp_path / "hone.toml"
    path.write_text("[policy]\nbase_model_file = 'model.txt'\n")
    assert load(path, {}, "cpu").policy.base_model == "org/secret-model"
    path.write_text("[policy]\nbase_model_file = 'model.txt'\nbase_model = 'x'\n")
    with pytest.raises(ConfigError, match=r"policy.base_model and policy.base_model_file are both set"):
        load(path, {}, "cpu")


def test_a_key_that_two_rooms_need_stands_once() -> None:
    config = read({"train": {"groups_per_batch": 3, "seed": 9}})
    assert config.learner.groups_per_batch == config.rollouts.groups_per_batch == 3
    assert config.learner.seed == config.rollouts.seed == 9


def test_observed_rollouts_are_trained_in_groups_of_the_runs_size() -> None:
    assert not read({}).rewards.passive.train
    config = read({"train": {"group_size": 3}}, {"HONE_PASSIVE__TRAIN": "true"})
    assert (config.rewards.passive.train, config.rewards.passive.group_size) == (True, 3)
    assert config.sections()["passive"] == {"train": True}
    assert "passive" not in config.sections()["rewards"]


def test_rooms_that_share_a_key_share_its_default() -> None:
    defaults: dict[tuple[str, str], Any] = {}
    shared = 0
    for source in SOURCES:
        for field in msgspec.structs.fields(source.type):
            if field.name in source.derived:
                continue
            key = (source.section, field.name)
            shared += key in defaults
            assert defaults.setdefault(key, field.default) == field.default, key
    assert shared >= 2  # groups_per_batch and seed


def test_what_follows_from_other_sections_is_filled_in() -> None:
    config = read(
        {
            "policy": {"base_model": "org/model", "name": "player"},
            "run": {"dir": "out"},
            "engine": {"port": 8123, "versions_max": 10},
            "capture": {"commit_timeout_s": 3.0},
            "train": {"infrastructure_retries": 1, "scenarios": "s.jsonl"},
            "rewards": {"script": "r.py"},
            "eval": {"scenarios": ["e.jsonl"]},
        }
    )
    assert config.proxy.policy == config.rollouts.model_name == "player"
    assert config.proxy.engines.urls == ("http://127.0.0.1:8123",)
    assert config.proxy.engines.versions_max == 10
    assert config.proxy.commit_timeout_s == 3.0
    assert config.rewards.infrastructure_retries == config.rollouts.infrastructure_retries == 1
    assert config.learner.base_model == "org/model"
    assert config.learner.adapter_dir == config.engine.adapter_dir == "/somewhere/out/adapters"
    assert config.learner.checkpoint_dir == "/somewhere/out/checkpoints"
    assert config.store.path == "/somewhere/out/hone.db"
    assert config.rewards.script == "/somewhere/r.py"
    assert config.train.scenarios == "/somewhere/s.jsonl"
    assert config.eval.scenarios == ["/somewhere/e.jsonl"]
    assert config.rollouts.cwd == "/somewhere"


@pytest.mark.parametrize(
    ("hardware", "given", "device", "dtype"),
    [
        ("cpu", {}, "cpu", "float32"),
        ("cuda", {}, "cuda", "bfloat16"),
        ("cuda", {"device": "cpu"}, "cpu", "float32"),
        ("cpu", {"dtype": "bfloat16"}, "cpu", "bfloat16"),
    ],
)
def test_the_learner_rounds_to_the_engines_dtype(
    hardware: Any, given: dict[str, str], device: str, dtype: str
) -> None:
    config = resolve({"policy": POLICY, "engine": given}, {}, FILE, hardware)
    assert (config.engine.device, config.engine.dtype, config.learner.dtype) == (device, dtype, dtype)


def test_the_resolved_settings_are_a_file_that_says_the_same() -> None:
    first = read(
        {"train": {"lr": 0.5}, "routes": {"*": {"to": "policy"}}, "rewards": {"weights": {"a b": 2.0}}}
    )
    second = resolve(tomllib.loads(to_toml(first.sections())), {}, FILE, "cpu")
    assert second == first


def test_secrets_are_not_printed() -> None:
    shown = redacted(
        {
            "a": {"api_key": "k1", "env": {"OPENAI_API_KEY": "k2", "MODE": "x"}, "key_env": "NAME"},
            "b": {"urls": ["http://user:k3@host/v1"], "max_tokens": 5},
        }
    )
    assert shown == {
        "a": {
            "api_key": "[redacted]",
            "env": {"OPENAI_API_KEY": "[redacted]", "MODE": "x"},
            "key_env": "NAME",
        },
        "b": {"urls": ["http://user:[redacted]@host/v1"], "max_tokens": 5},
    }
    config = read({"capture": {"redact": ["email", "hunter2"]}})
    assert redacted(config.sections())["capture"]["redact"] == ["email", "[redacted]"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["email", "("], "capture.redact: '(' is not a regular expression: missing )"),
        (["x*"], "capture.redact: 'x*' matches the empty string"),
        (["(a+)+$"], "capture.redact: '(a+)+$' takes exponential time"),
        ("email", "capture.redact: expected `array`, got `str`"),
    ],
)
def test_patterns_that_cannot_work_are_named(given: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read({"capture": {"redact": given}})
    assert str(caught.value).startswith(says)


def test_patterns_reach_whoever_logs_or_stores_what_agents_say() -> None:
    config = resolve({"policy": POLICY}, {"HONE_CAPTURE__REDACT": '["email", "PIN [0-9]{4}"]'}, FILE, "cpu")
    assert config.capture.redact == config.rollouts.redact == ("email", "PIN [0-9]{4}")
    with pytest.raises(ConfigError, match=r"unknown setting train\.redact; did you mean capture\.redact"):
        read({"train": {"redact": []}})


def test_without_a_base_model_calls_are_only_relayed_and_captured() -> None:
    config = read({"policy": {"base_model": ""}, "routes": {"*": {"url": "http://127.0.0.1:1/v1"}}})
    assert config.capture_only
    assert config.proxy.policy is None
    assert config.proxy.engines.urls == ()
    assert [part.name for part in serving(config, "python")] == ["proxy", "control"]
    with pytest.raises(ConfigError, match=r"policy\.base_model: not set: capture only"):
        require(config, training=True)
