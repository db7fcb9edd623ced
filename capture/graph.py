"""The call graph: which call continues which, who owns a sampled token, what may be trained.

Pure, and a function of the *set* of calls: in which order they arrived changes nothing. B continues
A when B's prompt begins with exactly A's prompt + sampled tokens (of several such A the longest);
otherwise B begins a branch of its own, for a reason that is recorded. Late calls are kept but change
nothing: what was settled without them stays true.
"""

from collections.abc import Collection, Sequence

import msgspec

from capture.forks import Forks
from capture.reasons import ERROR, FORKS, PARTIAL, SUPERSEDED, UNDELIVERED, UNPARSABLE
from capture.tokens import packed, shared_tokens
from capture.types import CallFate, ModelCall, Sample, Span

__all__ = ["FORKS", "CallGraph", "Node", "build", "fates", "samples"]

_FAILED = (ERROR, PARTIAL, UNPARSABLE)  # what makes a client ask again


class Node(msgspec.Struct, frozen=True):
    """A call and its place; exactly one of ``parent`` and ``fork`` is set."""

    call: ModelCall
    parent: str | None  # id of the call that it continues
    fork: str | None  # a reason from FORKS
    near: str | None = None  # id of the earlier call that the fork was judged against
    shared: int = 0  # leading prompt tokens that are those of `near`


class CallGraph(msgspec.Struct, frozen=True):
    """The calls of one rollout as a forest, in the order (started_at, id)."""

    nodes: dict[str, Node]

    def path(self, call_id: str) -> list[ModelCall]:
        """From the root to this call."""
        path = [self.nodes[call_id]]
        while path[-1].parent is not None:
            path.append(self.nodes[path[-1].parent])
        return [node.call for node in reversed(path)]

    def branches(self) -> list[list[ModelCall]]:
        """Every root-to-leaf path, in the order of their leaves."""
        inner = {node.parent for node in self.nodes.values()}
        return [self.path(call_id) for call_id in self.nodes if call_id not in inner]


def build(calls: Sequence[ModelCall]) -> CallGraph:
    """The graph of one rollout's calls. Ids are unique."""
    ordered = sorted(calls, key=_order)
    candidates = _candidates(ordered)
    forks = Forks()
    nodes: dict[str, Node] = {}
    for index, call in enumerate(ordered):
        able = [one for one in candidates if call.late or not one.call.late]
        parent = _parent(call, able)
        if parent is not None:
            nodes[call.id] = Node(call, parent.id, None)
        else:
            earlier = [one for one in ordered[:index] if call.late or not one.late]
            nodes[call.id] = _forked(call, earlier, forks)
    return CallGraph(nodes)


def fates(graph: CallGraph) -> list[CallFate]:
    """For each call, in order, why its tokens are not trained; None where they are."""
    extended = {node.parent for node in graph.nodes.values() if not node.call.late}
    calls = [node.call for node in graph.nodes.values()]
    superseded = _superseded([call for call in calls if not call.late], extended)
    return [CallFate(call.id, _excluded(call, extended, superseded)) for call in calls]


def samples(graph: CallGraph) -> list[Sample]:
    """The branches as training samples: every trainable sampled token has loss in exactly one.

    A call's tokens have loss in the earliest branch that contains it, and are context in the others.
    What is not trained (prompts, excluded calls) is context. A branch ends with its last trainable
    call; one that owns no tokens gives no sample.
    """
    trainable = {fate.call_id for fate in fates(graph) if fate.excluded is None}
    above: set[str] = set()  # calls with a trainable call further down
    for call_id in trainable:
        above.update(call.id for call in graph.path(call_id)[:-1])
    owned: set[str] = set()
    found = []
    for call_id in graph.nodes:
        if call_id in trainable and call_id not in above:
            path = graph.path(call_id)
            own = [call for call in path if call.id in trainable and call.id not in owned]
            owned.update(call.id for call in own)
            if any(call.sampled_ids for call in own):
                found.append(_sample(path[-1], own))
    return found


def _order(call: ModelCall) -> tuple[float, str]:
    return call.started_at, call.id


class _Candidate(msgspec.Struct, frozen=True):
    """A call that can be continued; its prompt + sampled tokens as bytes, which compare fast."""

    tokens: bytes
    call: ModelCall


def _candidates(calls: Sequence[ModelCall]) -> list[_Candidate]:
    """The longest first. Sampled tokens are never empty, so a parent is shorter than its child: no cycles."""
    found = [
        _Candidate(packed(call.prompt_ids + call.sampled_ids), call)
        for call in calls
        if call.prompt_ids and call.sampled_ids
    ]
    return sorted(found, key=lambda one: len(one.tokens), reverse=True)


def _parent(call: ModelCall, candidates: Sequence[_Candidate]) -> ModelCall | None:
    """The longest call that this one's prompt extends.

    Of equal ones those that began before it, then those that it may have been given, then the last.
    """
    prompt = packed(call.prompt_ids)
    equal: list[_Candidate] = []
    for one in candidates:
        if equal and len(one.tokens) < len(equal[0].tokens):
            break
        if prompt.startswith(one.tokens):
            equal.append(one)
    found = [one.call for one in equal]
    return max(found, key=lambda one: (_order(one) < _order(call), _is_given(one), _order(one)), default=None)


def _is_given(call: ModelCall) -> bool:
    return call.untrainable is None and not call.undelivered


def _forked(call: ModelCall, earlier: Sequence[ModelCall], forks: Forks) -> Node:
    fork = forks.judge(call, earlier)
    if fork.near is None:
        return Node(call, None, fork.reason)
    theirs = packed(fork.near.prompt_ids + fork.near.sampled_ids)
    return Node(call, None, fork.reason, fork.near.id, shared_tokens(packed(call.prompt_ids), theirs))


def _superseded(calls: Sequence[ModelCall], extended: Collection[str | None]) -> set[str]:
    """Calls that the client's SDK repeated. It counts: its n-th repetition follows its n-1 earlier ones.

    Like requests may be made in parallel, and each be repeated. So of the calls with the same body and
    count only as many are superseded as came again with a higher count: those that failed before the
    others, the undelivered before the delivered. What was extended had arrived, and is never superseded.
    """
    attempts: dict[bytes, dict[int, list[ModelCall]]] = {}
    for call in calls:
        attempts.setdefault(call.body_hash, {}).setdefault(call.retry_count, []).append(call)
    found: set[str] = set()
    for of_body in attempts.values():
        for count, level in of_body.items():
            again = max((len(later) for other, later in of_body.items() if other > count), default=0)
            able = sorted((call for call in level if call.id not in extended), key=_likely_repeated)
            found.update(call.id for call in able[:again])
    return found


def _likely_repeated(call: ModelCall) -> tuple[int, float, str]:
    """Order in which calls are taken for repeated; the same before and after fates are written down."""
    if call.untrainable in _FAILED:
        likely = 0
    elif call.untrainable == SUPERSEDED:
        likely = 1
    elif call.untrainable is None:
        likely = 2 if call.undelivered else 3
    else:
        likely = 4
    return likely, *_order(call)


def _excluded(call: ModelCall, extended: Collection[str | None], superseded: Collection[str]) -> str | None:
    if call.untrainable is not None:
        return call.untrainable
    if call.id in extended:
        return None
    if call.id in superseded:
        return SUPERSEDED
    return UNDELIVERED if call.undelivered else None


def _sample(leaf: ModelCall, own: Sequence[ModelCall]) -> Sample:
    token_ids = leaf.prompt_ids + leaf.sampled_ids
    loss_mask = [False] * len(token_ids)
    sampled_logprobs = [0.0] * len(token_ids)
    spans = []
    for call in own:
        start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.sampled_ids)
        loss_mask[start:end] = [True] * len(call.sampled_ids)
        sampled_logprobs[start:end] = call.sampled_logprobs
        assert call.policy_version is not None, "a trainable call names its version"
        spans.append(Span(start, end, call.id, call.policy_version, call.temperature))
    return Sample(
        rollout_id=leaf.rollout_id,
        token_ids=token_ids,
        loss_mask=loss_mask,
        sampled_logprobs=sampled_logprobs,
        spans=spans,
    )
