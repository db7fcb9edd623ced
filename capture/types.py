"""Every type that crosses a boundary: between rooms, into the store, onto the wire.

All are frozen msgspec Structs. Times are Unix seconds (float), token ids are ints, logprobs are
natural logarithms of the engine's sampling distribution softmax(logits / temperature).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

Mode = Literal["train", "eval", "observe"]
FinishStatus = Literal["completed", "agent_error", "timeout", "max_calls", "context_overflow", "failed"]
RolloutState = Literal[
    "open",  # calls may still arrive
    "sealed",  # finished; some of its calls may not be ingested yet
    "ingested",  # every call parsed, the call graph settled, waiting for its score
    "scored",  # has its reward (terminal for eval and observe)
    "reward_error",  # the script broke; the traceback is kept
    "failed",  # infrastructure; the runner may replace it
    "grouped",  # member of a closed group
    "taken",  # in a batch; the reward is frozen
    "trained",
    "dropped",  # with a reason
]
GroupState = Literal["open", "closed", "taken", "trained", "dropped"]
BatchState = Literal["taken", "committed", "dropped"]
VersionState = Literal["committed", "published", "active", "retired", "failed"]
EngineVersionState = Literal["loaded", "verified", "indistinguishable", "failed", "unloaded"]
PromotionKind = Literal["promote", "rollback"]
Attribution = Literal["path", "key", "header", "stitched", "headless"]
Scope = Literal["infer", "reward", "train", "admin"]


class Rollout(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at a scenario by an agent: many calls, one reward."""

    id: str
    key_id: str  # the owning key; every id lives in its namespace
    mode: Mode
    state: RolloutState = "open"
    status: FinishStatus | None = None  # set by sealing
    run_id: str | None = None
    scenario_id: str | None = None
    group_id: str | None = None
    attempt: int = 0  # 0, then one more for every infrastructure retry
    replaces: str | None = None  # the failed rollout that this one repeats
    session: str | None = None  # wire value of X-Session-ID within the key's namespace
    headless: bool = False  # nobody said whose call it was; never grouped
    passive: bool = False  # observed, and trained all the same: decided once, when it is settled
    policy: str | None = None
    policy_version: int | None = None  # pinned; None until the first call of an observe rollout
    secret_hash: bytes | None = None  # SHA-256 of the rollout key's secret
    call_count: int = 0
    max_calls: int | None = None
    created_at: float = 0.0
    last_call_at: float | None = None
    sealed_at: float | None = None
    scenario: Any = None  # the scenario object, as given
    metadata: Any = None
    metrics: dict[str, float] = {}
    stdout: str = ""
    reward: float | None = None
    scores: dict[str, float] = {}
    reward_error: str | None = None  # traceback or reason; never turned into a number
    script_hash: str | None = None
    drop_reason: str | None = None
    batch_id: str | None = None

    @property
    def for_training(self) -> bool:
        """Whether its tokens are to be trained, if nothing is in the way."""
        return self.mode == "train" or self.passive


class RawCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request and its response as the proxy saw them: a record of a journal frame."""

    id: str
    rollout_id: str
    key_id: str
    mode: Mode
    attribution: Attribution
    dialect: Literal["chat"] = "chat"
    stream: bool = False
    route: str  # the model name that the agent asked for
    upstream: str  # engine incarnation or upstream name that answered
    policy: str | None = None  # None: not a call to a model that is being trained
    policy_version: int | None = None
    started_at: float
    first_byte_at: float | None = None
    ended_at: float
    status: int  # HTTP status given to the agent; 499 when it hung up first
    request: bytes  # the body as the agent sent it
    response: bytes  # the upstream's body, unstripped; for streams all its SSE bytes
    changed: dict[str, Any] = {}  # request keys that were removed or replaced -> what was sent
    retry_count: int = 0  # x-stainless-retry-count
    idempotency_key: str | None = None  # the client's: the same one again is the same request again
    body_hash: bytes  # BLAKE2b-128 of the request body, as it is stored
    error: str | None = None  # set when our side or the upstream broke the call
    charged_tokens: int = 0  # to its key; 0 where the tokens of that one are not limited
    redacted: bool = (
        False  # something was taken out, and with it all ids; the bodies are no longer those above
    )


class Stitch(msgspec.Struct, frozen=True):
    """By what a later call is recognised that goes on from a call's answer and names no rollout."""

    digest: bytes  # of the conversation up to the answer, or of a random tool call id in it
    rollout_id: str  # the call's, or the first of those that it continues


class ModelCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call after ingest: parsed, with its exact tokens.

    Invariant when ``untrainable is None``: ``len(sampled_ids) == len(sampled_logprobs) ==
    usage.completion_tokens`` and ``prompt_ids`` is not empty.
    """

    id: str
    rollout_id: str
    policy: str | None
    policy_version: int | None
    started_at: float
    ended_at: float
    status: int
    model: str = ""
    temperature: float = 1.0
    messages: list[dict[str, Any]] = []  # of the request
    tools: list[dict[str, Any]] = []
    response: dict[str, Any] | None = None  # the assistant message
    finish_reason: str | None = None
    prompt_ids: list[int] = []
    sampled_ids: list[int] = []
    sampled_logprobs: list[float] = []
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retry_count: int = 0
    idempotency_key: str | None = None
    body_hash: bytes = b""
    late: bool = False  # committed after its rollout was sealed
    undelivered: bool = False  # the agent hung up before the terminal event
    untrainable: str | None = None  # reason, from the closed set in `capture.ingest`
    error: str | None = None


class CallFate(msgspec.Struct, frozen=True):
    """What the settled call graph says of one call's tokens."""

    call_id: str
    excluded: str | None  # untrainable reason or "superseded"; None: may be trained


class Span(msgspec.Struct, frozen=True):
    """Tokens ``[start, end)`` of a sample that one call sampled and owns."""

    start: int
    end: int
    call_id: str
    policy_version: int
    temperature: float


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A branch flattened for training; all four lists have one entry a token.

    ``loss_mask[i]`` is True iff token ``i`` was sampled by a call that this sample owns;
    ``sampled_logprobs[i]`` is meaningful only there (0.0 elsewhere).
    """

    rollout_id: str
    token_ids: list[int]
    loss_mask: list[bool]
    sampled_logprobs: list[float]
    spans: list[Span]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts of one scenario that are compared with each other."""

    id: str
    run_id: str | None
    scenario_id: str | None
    size: int  # declared number of members
    state: GroupState
    created_at: float
    closed_at: float | None = None
    batch_id: str | None = None

    @property
    def members_min(self) -> int:
        """How many of its members must have a reward. One declared alone is compared with what its scenario
        has brought so far, others with each other."""
        return 1 if self.size == 1 else 2


class RewardMean(msgspec.Struct, frozen=True):
    """Of the rewards of one scenario."""

    count: int = 0
    value: float = 0.0

    def after(self, reward: float) -> "RewardMean":
        """With one reward more (Welford, 1962: no sum that grows)."""
        count = self.count + 1
        return RewardMean(count, self.value + (reward - self.value) / count)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one take by the learner: the unit of exactly-once."""

    id: str
    run_id: str
    taken_at: float
    groups: list[list[Rollout]]  # scored members only, at least two unless a group was declared with one


class GroupFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which closed groups a take leaves out for good, by their rewards."""

    zero_variance: bool = False  # all rewards equal: nothing to learn from
    mean_min: float | None = None
    mean_max: float | None = None

    def reason(self, rewards: Sequence[float]) -> str | None:
        """Why a group with these rewards is dropped; None: it is not."""
        mean = math.fsum(rewards) / len(rewards)
        if self.mean_min is not None and mean < self.mean_min:
            return "too_hard"
        if self.mean_max is not None and mean > self.mean_max:
            return "too_easy"
        flat = len(rewards) > 1 and min(rewards) == max(rewards)  # one alone is compared with others' means
        return "zero_variance" if self.zero_variance and flat else None


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable version of a policy. Version 0 is the starting policy."""

    policy: str
    version: int
    lineage: str
    parent: int | None
    step: int  # optimizer steps so far in this lineage
    state: VersionState
    path: str | None  # adapter directory; None: the base model itself
    sha256: str | None  # of the adapter's weights
    created_at: float
    activated_at: float | None = None
    distance: int = 0  # lineage versions between version 0 and this one


class EngineVersion(msgspec.Struct, frozen=True, kw_only=True):
    """How far one engine incarnation has got with one version."""

    engine: str
    policy: str
    version: int
    state: EngineVersionState
    detail: str = ""
    in_flight: int = 0  # requests this engine was answering at activation
    at: float = 0.0


class Promotion(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody asked that everyone but training and evaluation be served a version. It is served from when a
    proxy made it so; until then, or if a `reason` says why not, the one before it still is."""

    n: int  # rises with every ask
    policy: str
    version: int
    kind: PromotionKind
    asked_at: float
    replaced: int | None = None  # the version that was served until then
    served_at: float | None = None
    reason: str | None = None  # why it never was served

    @property
    def is_open(self) -> bool:
        """True iff engines have yet to prove the version."""
        return self.served_at is None and self.reason is None


class LedgerRow(msgspec.Struct, frozen=True):
    """What became of one rollout's owned tokens in a committed batch."""

    rollout_id: str
    trained_tokens: int
    zero_advantage_tokens: int
    advantage: float


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one store transaction needs to commit a batch."""

    batch_id: str
    run_id: str
    lineage: str
    epoch: int  # of the learner's lease: the fence
    step: int
    checkpoint: str  # directory that holds adapter, optimizer, RNG; renamed into place already
    rows: list[LedgerRow]  # with `dropped`: one for every rollout of the batch
    metrics: dict[str, float]
    new_version: bool  # False when every advantage was zero
    dropped: dict[str, str] = {}  # rollouts that the learner left out -> reason


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """The chain of versions of one run."""

    id: str
    run_id: str
    policy: str
    start_version: int
    head_version: int
    step: int
    checkpoint: str | None
    ended: bool = False


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One committed batch in the run's history."""

    run_id: str
    batch_id: str
    step: int
    version: int
    committed_at: float
    metrics: dict[str, float]


class Balance(msgspec.Struct, frozen=True):
    """Where every sampled token of the policy went; each term counted from its own rows."""

    sampled: int
    trained: int
    zero_advantage: int
    dropped: dict[str, int]
    untrainable: dict[str, int]
    not_for_training: dict[str, int]
    pending: int

    @property
    def exact(self) -> bool:
        """True iff the terms add up to ``sampled``."""
        return self.sampled == (
            self.trained
            + self.zero_advantage
            + sum(self.dropped.values())
            + sum(self.untrainable.values())
            + sum(self.not_for_training.values())
            + self.pending
        )
