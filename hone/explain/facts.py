"""What is known of one rollout, brought together for the sentence and the screens. Pure.

The call graph is asked again rather than trusted from memory: for an open rollout, whose graph is not
settled, it says what would become of each call if the rollout were sealed now.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from capture.graph import CallGraph, Node, build, fates, samples
from capture.reasons import NOT_FOR_TRAINING
from capture.store import History
from capture.types import LedgerRow, ModelCall, Rollout, Version
from learner.advantage import Kind, Std, advantages
from rewards.groups import current

TRAINED, ZERO_ADVANTAGE, PENDING = "trained", "zero_advantage", "pending"
ROOT = "root"  # of `FORKS`: the one reason for a branch that is no trouble


class CallView(msgspec.Struct, frozen=True, kw_only=True):
    """One ingested call: its place in the call graph and what became of its sampled tokens."""

    number: int  # from 1, in the order of start
    id: str
    parent: int | None  # number of the call that it continues
    fork: str | None  # why it begins a branch: a reason from `FORKS`
    left: int | None  # number of the call that it is compared with for that
    branch: int | None  # number of the sample in which its tokens have loss; None: in no one
    fate: str  # trained, zero_advantage, pending, eval, observe, a drop reason or an untrainable reason
    excluded: str | None  # untrainable reason or "superseded"; None: its tokens may be trained
    sampled_tokens: int
    prompt_tokens: int
    policy: str | None
    policy_version: int | None
    model: str
    temperature: float
    status: int
    finish_reason: str | None
    started_at: float
    ended_at: float
    late: bool = False
    undelivered: bool = False
    retry_count: int = 0
    error: str | None = None

    @property
    def lost(self) -> bool:
        """Whether its tokens are not trained for a reason of its own, whatever becomes of its rollout."""
        return self.excluded is not None and self.fate == self.excluded


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the sentence is chosen from."""

    history: History
    calls: list[CallView]
    versions: list[Version]  # of the rollout's policy
    settings: Mapping[str, Any]  # sections, as saved with the run, else as they are now
    now: float

    @property
    def rollout(self) -> Rollout:
        """The rollout itself."""
        return self.history.rollout

    @property
    def row(self) -> LedgerRow | None:
        """Its row in the ledger: None unless its batch was committed."""
        return self.history.ledger.get(self.rollout.id)

    def setting(self, name: str) -> Any:
        """The value of `section.key`; None where it was not saved."""
        value: Any = self.settings
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


def gather(
    history: History,
    calls: Sequence[ModelCall],
    versions: Sequence[Version],
    settings: Mapping[str, Any],
    now: float,
) -> Facts:
    """Bring it together; `calls` are the rollout's ingested ones."""
    return Facts(
        history=history,
        calls=views(history, build(calls)),
        versions=list(versions),
        settings=settings,
        now=now,
    )


def views(history: History, graph: CallGraph) -> list[CallView]:
    """The calls in the graph's order."""
    excluded = {fate.call_id: fate.excluded for fate in fates(graph)}
    branches = {
        span.call_id: number for number, sample in enumerate(samples(graph), 1) for span in sample.spans
    }
    numbers = {call_id: number for number, call_id in enumerate(graph.nodes, 1)}
    whole = rollout_fate(history)
    return [_view(node, numbers, branches, excluded[call_id], whole) for call_id, node in graph.nodes.items()]


def _view(
    node: Node, numbers: Mapping[str, int], branches: Mapping[str, int], excluded: str | None, whole: str
) -> CallView:
    call = node.call
    not_meant = whole in NOT_FOR_TRAINING  # an evaluation's calls are that before they are anything else
    return CallView(
        number=numbers[call.id],
        id=call.id,
        parent=None if node.parent is None else numbers[node.parent],
        fork=node.fork,
        left=None if node.near is None else numbers[node.near],
        branch=branches.get(call.id),
        fate=whole if not_meant else excluded or whole,
        excluded=excluded,
        sampled_tokens=len(call.sampled_ids) or call.completion_tokens,
        prompt_tokens=call.prompt_tokens,
        policy=call.policy,
        policy_version=call.policy_version,
        model=call.model,
        temperature=call.temperature,
        status=call.status,
        finish_reason=call.finish_reason,
        started_at=call.started_at,
        ended_at=call.ended_at,
        late=call.late,
        undelivered=call.undelivered,
        retry_count=call.retry_count,
        error=call.error,
    )


def rollout_fate(history: History) -> str:
    """What became, or will become, of the rollout's trainable tokens."""
    rollout = history.rollout
    if not rollout.for_training:
        return rollout.mode
    if rollout.drop_reason is not None:
        return rollout.drop_reason
    row = history.ledger.get(rollout.id)
    if row is None:
        return PENDING
    return TRAINED if row.advantage else ZERO_ADVANTAGE


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """Where the sampled tokens of a rollout's own policy went; the terms add up to `sampled`."""

    sampled: int
    trained: int
    zero_advantage: int
    pending: int
    dropped: int
    untrainable: dict[str, int]  # by reason, superseded ones too
    not_for_training: int  # of an evaluation or an observed rollout
    elsewhere: int  # beyond `sampled`: sampled by models that are not being trained


def count_tokens(calls: Sequence[CallView]) -> TokenCount:
    """Count each call's tokens under what became of them."""
    own = [call for call in calls if call.policy is not None]
    lost, shared = Counter[str](), Counter[str]()
    for call in own:
        (lost if call.lost else shared)[call.fate] += call.sampled_tokens
    trained, zero, pending = (shared.pop(name, 0) for name in (TRAINED, ZERO_ADVANTAGE, PENDING))
    never = sum(shared.pop(mode, 0) for mode in NOT_FOR_TRAINING)
    return TokenCount(
        sampled=sum(call.sampled_tokens for call in own),
        trained=trained,
        zero_advantage=zero,
        pending=pending,
        dropped=shared.total(),
        untrainable={reason: tokens for reason, tokens in lost.items() if tokens},
        not_for_training=never,
        elsewhere=sum(call.sampled_tokens for call in calls if call.policy is None),
    )


def member_advantages(facts: Facts) -> dict[str, float]:
    """Rollout id -> advantage: the ledger's, else what the learner will give a closed group's members, as
    far as their rewards alone say it."""
    history = facts.history
    if history.ledger:
        return {rollout_id: row.advantage for rollout_id, row in history.ledger.items()}
    members = [member for member in history.members if member.state in ("grouped", "taken")]
    rewards = [member.reward for member in members if member.reward is not None]
    if len(rewards) < 2 or len(rewards) != len(members):
        return {}
    kind: Kind = facts.setting("train.advantage") or "centred"
    std: Std = facts.setting("train.advantage_std") or "sample"
    if kind == "grpo" and std == "batch":
        return {}  # no batch has it yet
    given = advantages(rewards, kind, std)
    return dict(zip((member.id for member in members), given, strict=True))


def alive_members(history: History) -> list[Rollout]:
    """The group's members without the attempts that a later one replaces."""
    return current(history.members)


def chain(versions: Sequence[Version], head: int) -> list[int]:
    """Version numbers from `head` back to the start of its lineages."""
    parents = {version.version: version.parent for version in versions}
    found: list[int] = []
    number: int | None = head
    while number is not None and number in parents and len(found) <= len(parents):
        found.append(number)
        number = parents[number]
    return found


def head_at(facts: Facts, at: float) -> int | None:
    """The newest version of the run's lineage at that moment."""
    lineage = facts.history.lineage
    if lineage is None:
        return None
    made = [v.version for v in facts.versions if v.lineage == lineage.id and v.created_at <= at]
    return max([lineage.start_version, *made])


def behind(facts: Facts, version: int | None, head: int | None) -> int | None:
    """Lineage versions between the two; None where one does not descend from the other."""
    if version is None or head is None:
        return None
    numbers = chain(facts.versions, head)
    return numbers.index(version) if version in numbers else None
