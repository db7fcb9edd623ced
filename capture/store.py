"""The durable store, as an interface. `capture.sqlite` implements it; so will Postgres.

Synchronous: asyncio processes call it through one thread of their own. Every method is one
transaction. Writers that hold a lease pass its epoch and get `Fenced` once somebody newer holds it.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from capture.types import (
    Balance,
    Batch,
    BatchState,
    CallFate,
    Commit,
    EngineVersion,
    FinishStatus,
    Group,
    GroupFilter,
    LedgerRow,
    Lineage,
    ModelCall,
    Promotion,
    PromotionKind,
    RawCall,
    RewardMean,
    Rollout,
    StepRow,
    Stitch,
    Version,
)

ALL_GROUPS = GroupFilter()


class PendingCall(msgspec.Struct, frozen=True):
    """A committed call that ingest has not parsed yet."""

    raw: RawCall
    late: bool


class ParentContent(msgspec.Struct, frozen=True):
    """What ingest needs of an earlier call of a rollout to store a new one as a difference."""

    call_id: str
    tokens: bytes  # prompt + sampled, as `capture.tokens.packed`
    messages: list[bytes]  # request messages + response, each the JSON that is stored


class ContentBase(msgspec.Struct, frozen=True):
    """The earlier call that a new one is stored as a difference to, and the prefixes that they share."""

    content: ParentContent
    shared_tokens: int
    shared_messages: int


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """One cheap look over the store, for `hone status`, progress and gauges."""

    rollouts: dict[str, int]  # by state
    groups: dict[str, int]  # by state
    batches: dict[str, int]  # by state
    calls: int
    calls_not_ingested: int
    failed_calls: int  # status >= 400 or broken on our side, agent's 4xx included
    drops: dict[str, int]  # rollouts by reason
    untrainable: dict[str, int]  # calls by reason


class FateCounts(msgspec.Struct, frozen=True):
    """How many rollouts and calls of a policy met which fate."""

    rollouts: dict[str, int]
    """By `trained`, `zero_advantage`, `no_tokens` (in a committed batch, with none that could be
    trained), `pending`, `eval`, `observe`, or a drop reason."""
    calls: dict[str, int]
    """Calls of rollouts for training whose tokens are not trained for a reason of their own, by that reason;
    those that went to models that are not being trained are among them."""


class Rescored(msgspec.Struct, frozen=True, kw_only=True):
    """A new score of a rollout that is stored."""

    rollout_id: str
    reward: float  # finite
    scores: dict[str, float]
    script_hash: str
    posted: dict[str, float]  # the posted scores that are in it


class Drop(msgspec.Struct, frozen=True):
    """When and why a rollout left the pipeline, and how many trainable sampled tokens left with it."""

    reason: str
    tokens: int
    at: float


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A batch without its rollouts."""

    id: str
    state: BatchState
    taken_at: float
    committed_at: float | None = None
    step: int | None = None  # optimizer steps of the lineage after it
    version: int | None = None  # the version that its commit made; None: no advantage, no version
    reason: str | None = None  # why it was dropped
    groups: int = 0


class WaitingCall(msgspec.Struct, frozen=True, kw_only=True):
    """A committed call that is not ingested, as far as it is known without parsing it."""

    id: str
    started_at: float
    ended_at: float
    status: int
    policy_version: int | None = None
    late: bool = False
    error: str | None = None


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the calls that the store knows of one rollout, read at one moment."""

    rollout: Rollout
    group: Group | None = None
    members: list[Rollout] = []  # of the group, all attempts, the rollout itself included
    ledger: dict[str, LedgerRow] = {}  # of the rollout's batch's members that are in `members`
    drop: Drop | None = None
    batch: BatchRow | None = None
    waiting: list[WaitingCall] = []
    calls_in_flight: int = 0
    posted: dict[str, float] = {}  # scores that were posted
    lineage: Lineage | None = None  # of its run
    run_end_reason: str | None = None
    groups_ready: int = 0  # closed groups of the run that no batch has taken
    leases: list[str] = []  # names of those that somebody holds


class Store(Protocol):
    """Everything durable. All ids are text; times are Unix seconds of the store's clock."""

    def close(self) -> None: ...
    def now(self) -> float: ...

    # -- leases ------------------------------------------------------------------------------
    def acquire_lease(self, name: str, holder: str, ttl_s: float) -> int | None:
        """Take or renew a lease; its epoch (rises with each change of holder), or None if held."""

    def release_lease(self, name: str, holder: str) -> None: ...
    def live_leases(self, prefix: str) -> dict[str, str]:
        """Unexpired leases whose name starts with `prefix` -> holder."""

    # -- runs and lineages -------------------------------------------------------------------
    def start_run(
        self, run_id: str, policy: str, settings: Mapping[str, Any], *, start_version: int = 0
    ) -> Lineage:
        """Create the run, its lineage and version 0 where they do not exist; idempotent. Its training
        rollouts begin at `start_version`: `NotFound` for one that never was active."""

    def run_settings(self, run_id: str) -> dict[str, Any]: ...
    def lineage(self, run_id: str) -> Lineage: ...
    def latest_run(self) -> str | None: ...
    def end_run(self, run_id: str, reason: str) -> int:
        """Drop what is not in a committed batch (`dropped(reason)`); rollouts dropped. Idempotent."""

    # -- rollouts (proxy, runner) ------------------------------------------------------------
    def open_rollout(self, rollout: Rollout, *, group_size: int | None = None) -> Rollout:
        """Insert, and its group where `group_id` is new. Pins `policy_version` if it is None and
        mode is train (active version) or eval (active version). `Conflict` if the id exists, the
        group is closed or (train) the run has ended; `NotFound` if the group is another key's. A
        train rollout that names a group and no run joins the policy's live run."""

    def session_rollout(self, key_id: str, session: str, fresh: Rollout) -> Rollout:
        """The open observe rollout of that session, or `fresh` inserted."""

    def rollout(self, rollout_id: str) -> Rollout:
        """`NotFound` if there is none."""

    def rollouts(
        self,
        *,
        run_id: str | None = None,
        group_id: str | None = None,
        mode: str | None = None,
        states: Sequence[str] = (),
        limit: int = 1000,
        after: str | None = None,
    ) -> list[Rollout]:
        """Ordered by id; `after` pages."""

    def seal_rollout(
        self,
        rollout_id: str,
        status: FinishStatus,
        *,
        metrics: Mapping[str, float] | None = None,
        stdout: str = "",
    ) -> Rollout:
        """open -> sealed (`failed` goes straight to failed and drops its tokens). Sealing twice
        with the same status is idempotent; with another one `Conflict`."""

    def touch_in_flight(self, holder: str, open_calls: Mapping[str, int], ttl_s: float) -> None:
        """Record which rollouts `holder` has calls in flight for; replaces its earlier record."""

    def idle_rollouts(self, idle_s: float, limit: int = 100) -> list[Rollout]:
        """Open rollouts with no call for `idle_s` and none in flight under a live record."""

    def post_score(self, rollout_id: str, name: str, value: float, source: str) -> None:
        """`RewardFrozen` once the batch is taken (the value is kept as a metric then)."""

    def posted_scores(self, rollout_id: str) -> dict[str, float]:
        """The scores that `post_score` accepted, the latest for each name."""

    def rollout_of_call(self, call_id: str) -> str: ...

    # -- calls (proxy's journal) -------------------------------------------------------------
    def commit_calls(
        self,
        frame: bytes,
        records: Sequence[RawCall],
        new: Sequence[Rollout],
        stitches: Mapping[str, Sequence[Stitch]] = MappingProxyType({}),
    ) -> None:
        """One compressed frame, a narrow row for each record, the rollouts' heads, rollouts
        nobody opened (`new`, ignored where they exist) and the records' stitches (by call id),
        in one durable transaction. A record whose rollout is past `open` gets `late`. What records are
        charged is added up by key."""

    def key_tokens(self, key_ids: Sequence[str]) -> dict[str, int]:
        """Tokens that the calls of these keys were charged so far; keys without any are left out."""

    def stitched(self, stitches: Sequence[tuple[str, bytes]]) -> dict[tuple[str, bytes], str | None]:
        """For each `(key id, digest)` the rollout that was written with it; None if several were,
        which stays so. What nobody wrote is left out."""

    def share_stitches(self, stitches: Sequence[tuple[str, bytes]]) -> None:
        """Mark `(key id, digest)` as written by calls of several rollouts."""

    def prune_stitches(self, older_than_s: float) -> int:
        """Delete some of the stitches that were last written that long ago; returns how many."""

    def raw_calls(self, rollout_id: str, *, but: Collection[str] = (), limit: int = 64) -> list[RawCall]:
        """The newest committed calls of a rollout whose frames are still there, oldest first, without
        those in `but`; looks at `limit` calls."""

    def mark_undelivered(self, call_ids: Sequence[str]) -> None: ...
    def broken_calls(self, rollout_id: str) -> int:
        """Committed calls that our side or the upstream broke: a 5xx, or an error after a good status."""

    # -- ingest and scoring (control) --------------------------------------------------------
    def pending_calls(self, limit: int) -> list[PendingCall]: ...
    def parents(self, rollout_id: str) -> list[ParentContent]:
        """What is stored of the rollout, in the order in which it was stored."""

    def save_calls(self, calls: Sequence[ModelCall], bases: Mapping[str, ContentBase]) -> None:
        """Store parsed calls, each as a difference to its base (by call id; a base that is not
        stored before is not used); idempotent by call id. At most 64 calls a transaction."""

    def calls(self, rollout_id: str) -> list[ModelCall]:
        """Every ingested call of the rollout, whole again, ordered by start."""

    def settleable(self, limit: int = 100) -> list[Rollout]:
        """Sealed rollouts all of whose committed calls are ingested."""

    def settle(
        self,
        rollout_id: str,
        fates: Sequence[CallFate],
        *,
        scenario_id: str | None = None,
        passive: bool = False,
        aside: str | None = None,
    ) -> None:
        """sealed -> ingested; records which calls are excluded and why. A rollout that names no scenario gets
        `scenario_id`. With `passive` an observed one that names no group and no run is for training from
        now on, in the policy's live run, if the policy answered it; without such a run it stays observed.
        With `aside` an observed one is dropped for that reason: it is neither scored nor trained."""

    def scoreable(self, limit: int = 100) -> list[Rollout]:
        """Rollouts in state ingested, and scored or grouped ones for which a score was posted since."""

    def save_score(
        self,
        rollout_id: str,
        reward: float,
        scores: Mapping[str, float],
        script_hash: str,
        *,
        group_size: int = 0,
    ) -> None:
        """ingested -> scored. A rollout for training that is in no group is dropped (`ungrouped`), except
        that an observed one with tokens to train, which is not headless, joins the group that gathers
        those of its run, key and scenario; such a group is opened with `group_size`."""

    def save_reward_error(self, rollout_id: str, error: str, script_hash: str) -> None: ...
    def rescore(self, rescored: Sequence[Rescored], *, group_size: int = 0) -> None:
        """Replace the scores of rollouts that had their turn, all of them or none. `RewardFrozen` where a
        batch took one; `Conflict` where one has no turn yet, a score was posted since, or a scored member of
        an open or closed group would keep the score of another script.

        A `reward_error` for training whose group is open (or that an open group of observed ones may gather,
        opened with `group_size`) is scored and back in the pipeline. Others that were dropped stay dropped
        and keep the new score."""

    def open_groups(self, limit: int = 1000) -> list[Group]:
        """Declared groups that are open, the oldest first."""

    def gathered_groups(self, older_than_s: float, limit: int = 100) -> list[Group]:
        """Open groups of observed rollouts that have all their members or are that old; the others, which
        may be many, wait for more members."""

    def group(self, group_id: str) -> Group: ...
    def close_group(self, group_id: str, members: Sequence[str], drops: Mapping[str, str]) -> None:
        """open -> closed with these scored members; the others are dropped with their reason.
        Fewer than two members, of a group declared with more than one: the whole group is dropped
        (`group_too_small`)."""

    def reward_means(
        self, run_id: str, asked: Collection[tuple[str, str | None]]
    ) -> dict[tuple[str, str | None], RewardMean]:
        """Of the run's rewards in committed batches, by key and scenario; what has none yet is left out."""

    def prune_frames(self, older_than_s: float) -> int:
        """Delete frames that were wholly ingested that long ago; returns how many."""

    # -- learner -----------------------------------------------------------------------------
    def groups_of_run(self, run_id: str) -> dict[str, int]:
        """Number of groups by state."""

    def group_count(self, run_id: str) -> int:
        """How many groups this run ever declared (the next ordinal)."""

    def outstanding_groups(self, run_id: str) -> int:
        """Declared groups open, closed or taken: what admission counts. Groups of observed rollouts, which
        may be open for long, hold up neither the runner nor the end of the run."""

    def take_batch(
        self,
        run_id: str,
        *,
        epoch: int,
        groups: int,
        batch_wait_s: float,
        staleness_max: int,
        unless: GroupFilter = ALL_GROUPS,
    ) -> Batch | None:
        """The batch this run already took and did not commit, else the oldest `groups` closed
        groups (fewer once the first has waited `batch_wait_s`), else None. Groups in which some
        rollout's version is further than `staleness_max` behind the head are dropped (`stale`), and those
        for which `unless` has a reason."""

    def commit_batch(self, commit: Commit) -> Version | None:
        """Ledger rows, lineage head, step row, rollout states and (if `new_version`) the next
        version number, in one transaction; `Fenced` if the epoch is old. None: no new version.
        Rollouts in `commit.dropped` leave the batch with their reason instead of a ledger row.
        Committing a batch again returns what the first commit did."""

    def drop_batch(self, batch_id: str, reason: str, epoch: int) -> None: ...
    def publish_version(self, policy: str, version: int, path: str, sha256: str, epoch: int) -> None:
        """committed -> published: the adapter directory is complete."""

    def steps(self, run_id: str) -> list[StepRow]: ...
    def put_metrics(self, run_id: str, kind: str, metrics: Mapping[str, Any]) -> None:
        """Append one row of JSON to the run's history (evaluations, mismatch, swaps)."""

    def get_metrics(self, run_id: str, kind: str) -> list[dict[str, Any]]: ...

    # -- versions and engines ----------------------------------------------------------------
    def start_policy(self, policy: str, path: str | None, sha256: str | None) -> Version:
        """Version 0 of the policy: as it is stored, else made: the adapter at `path`, or the base. `Conflict`
        for an adapter if the base has answered calls as version 0."""

    def versions(self, policy: str) -> list[Version]: ...
    def active_version(self, policy: str) -> Version | None: ...
    def promoted_version(self, policy: str) -> Version | None: ...
    def record_engine_version(self, row: EngineVersion) -> None: ...
    def engine_versions(self, policy: str) -> list[EngineVersion]: ...
    def activate(self, policy: str, version: int, epoch: int) -> None:
        """One row: training rollouts opened from now on use this version. Needs at least one
        engine that verified it (`Conflict`); never goes back to an older one of the lineage."""

    def retire_version(self, policy: str, version: int) -> None: ...
    def ask_promotion(self, policy: str, version: int | None, kind: PromotionKind) -> Promotion | None:
        """Ask that `version` be promoted, in place of what was asked for and is not served yet. None: it is
        promoted already. Version None: the active one; for a rollback the one promoted before the present
        one. `NotFound`, or `Conflict` for a version that no engine ever proved, say what to do."""

    def promotions(self, policy: str) -> list[Promotion]:
        """All of them, oldest first."""

    def open_promotion(self, policy: str) -> Promotion | None:
        """The one that is asked for and not served yet."""

    def promote(self, n: int, epoch: int) -> bool:
        """One row: everyone but training and evaluation is served this promotion's version from now on.
        False if it was taken back meanwhile; `Conflict` unless an engine has verified the version."""

    def refuse_promotion(self, n: int, reason: str, epoch: int) -> None:
        """Close it without serving it, unless it is closed."""

    def pinned_versions(self, policy: str) -> dict[int, int]:
        """Version -> number of open rollouts pinned to it. Observed ones are not: each of their calls gets
        the version that is promoted then."""

    def expire_pins(self, policy: str, version: int) -> int:
        """Drop (`stale`) the open training rollouts pinned to `version`; how many."""

    # -- one rollout's story -----------------------------------------------------------------
    def find_rollout(self, text: str) -> str:
        """The id of the rollout that a rollout's or call's id, or the beginning of one, means.
        `NotFound` where none begins so, `Conflict` where several do."""

    def history(self, rollout_id: str) -> History:
        """`NotFound` if there is none."""

    # -- sums --------------------------------------------------------------------------------
    def balance(self, policy: str) -> Balance: ...
    def counts(self, run_id: str | None = None) -> Counts: ...
    def fate_counts(self, policy: str) -> FateCounts: ...
    def ledger_twice(self) -> int:
        """Rollouts that stand in the ledger more than once: 0, or something is broken."""

    def verify(self) -> list[str]:
        """Every invariant that does not hold, in words; empty when all do."""
