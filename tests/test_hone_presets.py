"""Presets are defaults: what they set, and what wins over them."""

from pathlib import Path
from typing import Any

import pytest

from capture.errors import ConfigError
from hone.config import Config, resolve
from hone.presets import PRESETS
from hone.sections import SOURCES

FILE = Path("/somewhere/hone.toml")


def read(train: dict[str, Any], environ: dict[str, str] | None = None) -> Config:
    return resolve({"policy": {"base_model": "org/model"}, "train": train}, environ or {}, FILE, "cpu")


def test_presets_set_only_what_there_is_to_set() -> None:
    known = {(source.section, key) for source in SOURCES for key in source.types()}
    for name, sections in PRESETS.items():
        given = {(section, key) for section, values in sections.items() for key in values}
        assert given <= known, name
        read({"preset": name})


def test_the_first_preset_is_every_default() -> None:
    assert read({"preset": "hone"}) == read({})


def test_a_preset_sets_the_defaults_of_several_rooms() -> None:
    config = read({"preset": "a"})
    assert (config.rollouts.group_size, config.rollouts.groups_per_batch, config.rollouts.epochs) == (4, 1, 3)
    assert (config.learner.lr, config.learner.kl_coef, config.learner.lora_rank) == (1e-6, 0.01, 32)
    assert (config.proxy.sampling.max_tokens, config.learner.groups_per_batch) == (2048, 1)
    assert config.train.preset == "a"
    other = read({"preset": "b"})
    assert (other.rollouts.group_size, other.rollouts.groups_per_batch, other.rollouts.epochs) == (8, 8, 1)
    assert other.learner.kl_coef == 0.001


def test_papers_by_name() -> None:
    grpo, dapo = read({"preset": "grpo"}).learner, read({"preset": "dapo"}).learner
    assert (grpo.loss, grpo.advantage, grpo.aggregation) == ("ppo", "grpo", "sequence_mean")
    assert (grpo.clip_range, grpo.kl_coef, grpo.kl_form) == ((0.2, 0.2), 0.04, "r_k3")
    assert (dapo.loss, dapo.clip_range, dapo.aggregation, dapo.kl_coef) == (
        "ppo",
        (0.2, 0.28),
        "token_mean",
        0.0,
    )
    assert dapo.zero_variance_filter
    assert dapo.overlong_filter
    dr_grpo, gspo = read({"preset": "dr_grpo"}).learner, read({"preset": "gspo"}).learner
    assert (dr_grpo.advantage, dr_grpo.aggregation) == ("centred", "constant")
    assert (gspo.loss, gspo.clip_range, gspo.aggregation) == ("gspo", (3e-4, 4e-4), "sequence_mean")


def test_what_the_file_and_the_environment_say_wins() -> None:
    config = read({"preset": "grpo", "kl_coef": 0.0, "clip_high": 0.3}, {"HONE_TRAIN__LOSS": "cispo"})
    assert (config.learner.kl_coef, config.learner.loss, config.learner.clip_range) == (
        0.0,
        "cispo",
        (0.2, 0.3),
    )
    assert config.learner.aggregation == "sequence_mean"
    assert read({"preset": "grpo"}, {"HONE_TRAIN__PRESET": "gspo"}).learner.loss == "gspo"


@pytest.mark.parametrize("name", ["grop", 3, ["grpo"]])
def test_an_unknown_preset_is_named(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.preset: .* is none of hone, a, b, grpo, dapo"):
        read({"preset": name})
