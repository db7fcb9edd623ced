"""The settings of the rewards room: the script, its sandbox, sealing and grouping."""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class SealSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rewards.seal]`: when a rollout that nobody finished is over."""

    idle_s: Seconds = 120.0
    """Without a call for this long, and none in flight: train and eval `timeout`, observe `completed`."""


class PassiveSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[passive]`: training on what nobody opened for training."""

    train: bool = False
    """Observed rollouts are trained by the live run, as far as the policy answered them and their sampling
    was pure. They are grouped by scenario and by the key that owns them: what one tenant's users ask is
    never compared with what another's do. They are served the promoted version: once that is further than
    `train.staleness_max` behind, they are dropped as stale."""
    group_size: Count = 8
    """Scored rollouts that fill a group."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[rewards]`."""

    script: str = ""
    """Path of the reward script; empty: only scores posted to `POST /rewards` count."""
    python: str = ""
    """Interpreter (3.9 or later) that runs the script, for scripts that need packages of yours; empty: Hone's
    own. A path is relative to the settings' file, a bare name is looked up in PATH."""
    env: dict[str, str] = {}
    """Environment of the script: these alone."""
    timeout_s: Seconds = 10.0
    """Deadline of one trace; then the script and all its children are killed."""
    start_timeout_s: Seconds = 60.0
    """Deadline for the interpreter to start and import the script."""
    workers: Count = 2
    """Processes that run the script; each scores one trace at a time."""
    traces_per_worker: Count = 2_000
    """A worker is replaced after this many traces, so leaks in a script stay small."""
    queue_max: Count = 64
    """Traces handed to the workers or waiting for one."""
    memory_bytes_max: Annotated[int, msgspec.Meta(ge=64 << 20)] = 2 << 30
    """Address space of a worker and of each of its children."""
    file_bytes_max: Annotated[int, msgspec.Meta(ge=1 << 12)] = 16 << 20
    """Size of any file that the script writes."""
    processes_max: Count = 256
    """Processes and threads that the script may add to its user's; not enforced for root."""
    on_agent_failure: Literal["score", "drop"] = "score"
    """Rollouts whose agent crashed, timed out or hit a cap: score them, or drop them (`agent_failure`)."""
    require: list[str] = []
    """Scores to be posted before a rollout is scored."""
    wait_s: Seconds = 3600.0
    """How long after sealing to wait for them; then `reward_error`."""
    weights: dict[str, float] = {}
    """Weights of posted scores; a script's `WEIGHTS` come first, a missing name weighs 1."""
    group_deadline_s: Seconds = 3600.0
    """A group this old closes on the members that are scored, if these are at least two."""
    infrastructure_retries: Annotated[int, msgspec.Meta(ge=0)] = 2
    """How often the runner repeats a `failed` rollout; only the last attempt's failure is final."""
    raw_retention_s: Annotated[float, msgspec.Meta(ge=0)] = 3600.0
    """How long the raw bytes of calls are kept after they were parsed."""
    seal: SealSettings = SealSettings()
    passive: PassiveSettings = PassiveSettings()
