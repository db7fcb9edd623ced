"""The settings that belong to no room: policy, engine, where files go, control, evaluation."""

from typing import Annotated, Literal

import msgspec

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Device = Literal["auto", "cpu", "cuda"]


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[policy]`: what is trained."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = "policy"
    """The model name that agents ask for."""
    base_model: str = ""
    """A directory or a Hugging Face id; empty: nothing is trained, calls are relayed and captured."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[run]`: where everything that Hone writes goes."""

    dir: str = "runs"
    """Store, adapters, checkpoints, logs and the state file."""
    log_bytes_max: Positive = 20_000_000
    """A part's log above this is moved aside when the part starts; one older log is kept."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine]`: the vLLM server that `hone up` starts, or those it is pointed at."""

    urls: list[str] = []
    """Servers that run already; empty: start one here."""
    host: str = "127.0.0.1"
    """Keep it on loopback: vLLM's admin routes have no key."""
    port: Port = 8100
    device: Device = "auto"
    """auto: cuda where there is an NVIDIA device, else cpu."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: float32 on the CPU, the model's own on a GPU."""
    tool_parser: str | None = "hermes"
    """vLLM's `--tool-call-parser`; null: tools are not parsed."""
    reasoning_parser: str | None = None
    max_model_len: Positive | None = None
    """Tokens of prompt and answer; null: the model's."""
    max_seqs: Positive = 128
    """Requests that are sampled at once."""
    versions_max: Annotated[int, msgspec.Meta(ge=2)] = 8
    """Adapters alive at once: `staleness_max` + 2 at least."""
    adapter_dir: str = ""
    """Where adapters are published; engines must see it under this path. Empty: `<run.dir>/adapters`."""
    block_size: Positive | None = None
    """Tokens of a KV block; null: 32 on the CPU (short talks then share prefixes), else vLLM's."""
    kv_cache_gb: Positive = 1
    """KV cache on the CPU; vLLM takes whole gibibytes."""
    gpu_memory_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """Of a GPU's memory."""
    threads: Positive | None = None
    """Engine threads on the CPU; null: one for every two cores."""
    keep_alive_s: Positive = 75
    """Idle connections live that long; the proxy's own pool lets go sooner."""
    ready_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 900.0
    """How long it may take to load."""
    args: list[str] = []
    """Further arguments for vLLM, appended."""


class ControlSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[control]`: the process that ingests, seals, scores and groups."""

    host: str = "127.0.0.1"
    port: Port = 8001


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[capture]`, the part that says where the store is."""

    path: str = ""
    """The SQLite file; empty: `<run.dir>/hone.db`."""


class EvalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[eval]`: rollouts that measure and never train."""

    scenarios: list[str] = []
    """Scenario files; the report has one column for each."""
    env: dict[str, str] = {}
    """More variables for the agents of an evaluation."""


class PromoteSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[promote]`: promotion by itself, after `hone eval`."""

    auto: bool = False
    """Promote a version whose evaluation beats that of the promoted one."""
    margin: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """By more than this in mean reward: the whole 95 % interval of the difference lies above it."""
    rollouts_min: Annotated[int, msgspec.Meta(ge=2)] = 50
    """Scored rollouts that each of the two must have on the scenarios that both have played."""


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[train]`, the part that belongs to neither learner nor runner."""

    preset: str = "hone"
    """Defaults for the other settings: `hone.presets` has the names."""
    scenarios: str = "scenarios.jsonl"
    """The scenario set, one JSON object a line."""
    wall_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Training ends after this long, if nothing else ended it."""
    init_adapter: str | None = None
    """An adapter that Hone wrote (`hone sft`, `hone adapters export`) as version 0; absent: the base."""
    key_env: str = "HONE_API_KEY"
    """Variable with the proxy key (scope `train`) of the runner; unset: no key."""
