"""Presets: named defaults for `hone.toml`. What the file or the environment says wins over them.

`a` and `b` are settings of whole runs; the others say how their papers compare, weigh and bound, and leave
sizes and rates alone. What differs from the papers: tokens are counted before anything is filtered, and the
KL penalty of `grpo` is r · k3, whose gradient is that of the KL, not k3.
"""

from collections.abc import Mapping
from typing import Any, Final

from capture.errors import ConfigError

_RUN: Final = {
    "lora_rank": 32,
    "lr": 1e-6,
    "max_calls": 30,
    "timeout_s": 600.0,
    "save_every": 20,
    "seed": 42,
}
_SAMPLING: Final = {"temperature": 1.0, "max_tokens": 2048}

PRESETS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "hone": {},
    "a": {
        "train": {**_RUN, "group_size": 4, "groups_per_batch": 1, "epochs": 3, "kl_coef": 0.01},
        "sampling": _SAMPLING,
    },
    "b": {
        "train": {**_RUN, "group_size": 8, "groups_per_batch": 8, "epochs": 1, "kl_coef": 0.001},
        "sampling": _SAMPLING,
    },
    "grpo": {  # Shao et al., 2024
        "train": {
            "advantage": "grpo",
            "loss": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "sequence_mean",
            "kl_coef": 0.04,
            "kl_form": "r_k3",
        }
    },
    "dapo": {  # Yu et al., 2025
        "train": {
            "advantage": "grpo",
            "loss": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.28,
            "aggregation": "token_mean",
            "zero_variance_filter": True,
            "overlong_filter": True,
        }
    },
    "dr_grpo": {  # Liu et al., 2025
        "train": {
            "advantage": "centred",
            "loss": "ppo",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "aggregation": "constant",
        }
    },
    "gspo": {  # Zheng et al., 2025
        "train": {
            "advantage": "grpo",
            "loss": "gspo",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "sequence_mean",
        }
    },
}
"""Name -> section -> setting -> value."""


def apply(tables: Mapping[str, dict[str, Any]]) -> None:
    """Give the sections of a file the defaults of the preset that `train.preset` names."""
    name = tables["train"].get("preset", "hone")
    if not isinstance(name, str) or name not in PRESETS:
        raise ConfigError(f"train.preset: {name!r} is none of {', '.join(PRESETS)}")
    for section, values in PRESETS[name].items():
        for key, value in values.items():
            tables[section].setdefault(key, value)
