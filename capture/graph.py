"""The call graph: which call continues which, who owns a sampled token, what may be trained.

Pure, and a function of the *set* of calls: in which order they arrived changes nothing. B continues
A when B's prompt begins with exactly A's prompt + sampled tokens (of several such A the longest). A call
that continues none, or one that was continued before, begins a branch, for a reason that is recorded.
Late calls are kept but change nothing: what was settled without them stays true.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from capture.forks import Fork, Forks
from capture.reasons import ERROR, FORKS, LATE, PARTIAL, SUPERSEDED, UNDELIVERED, UNPARSABLE
from capture.tokens import packed, shared_tokens
from capture.types import CallFate, ModelCall, Sample, Span

__all__ = ["FORKS", "CallGraph", "Node", "build", "fates", "samples"]

_FAILED = (ERROR, PARTIAL, UNPARSABLE)  # what makes a client ask again


class Node(msgspec.Struct, frozen=True):
    """A call and its place."""

    call: ModelCall
    parent: str | None  # id of the call that it continues
    fork: str | None  # why it begins a branch, from FORKS; None: it is the first to continue its parent
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
    tokens = {call.id: _Tokens(call) for call in ordered}
    parents = _parents(ordered, tokens)
    forks = Forks()
    nodes: dict[str, Node] = {}
    for index, call in enumerate(ordered):
        parent = parents.get(call.id)
        earlier = [one for one in ordered[:index] if call.late or not one.late]
        if parent is not None and all(parents.get(one.id) is not parent for one in earlier):
            nodes[call.id] = Node(call, parent.id, None)
        else:
            nodes[call.id] = _forked(call, parent, forks.judge(call, earlier, parent), tokens)
    return CallGraph(nodes)


def fates(graph: CallGraph) -> list[CallFate]:
    """For each call, in order, why its tokens are not trained; None where they are."""
    extended = _extended(graph)
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
        parent = graph.nodes[call_id].parent
        while parent is not None and parent not in above:
            above.add(parent)
            parent = graph.nodes[parent].parent
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


class _Tokens:
    """A call's tokens as bytes, which compare fast."""

    __slots__ = ("prompt", "whole")

    def __init__(self, call: ModelCall) -> None:
        self.prompt = packed(call.prompt_ids)
        self.whole = self.prompt + packed(call.sampled_ids)


def _parents(calls: Sequence[ModelCall], tokens: Mapping[str, _Tokens]) -> dict[str, ModelCall]:
    """For each call that continues another, by its id, the longest one that its prompt extends.

    In the order of their bytes everything that begins with a call comes right after it. So one walk over
    the sorted prompts and calls, with the calls that the present one begins with on a stack, finds every
    parent in n log n comparisons. Sampled tokens are never empty: a parent is shorter than its child.
    """
    entries = [(tokens[call.id].whole, 0, call) for call in calls if call.prompt_ids and call.sampled_ids]
    entries += [(tokens[call.id].prompt, 1, call) for call in calls if call.prompt_ids]
    found: dict[str, ModelCall] = {}
    stack: list[tuple[bytes, list[ModelCall]]] = []  # of equal calls
    for whole, is_prompt, call in sorted(entries, key=lambda entry: entry[:2]):
        while stack and not whole.startswith(stack[-1][0]):
            stack.pop()
        if is_prompt:
            parent = _chosen(call, stack)
            if parent is not None:
                found[call.id] = parent
        elif stack and stack[-1][0] == whole:
            stack[-1][1].append(call)
        else:
            stack.append((whole, [call]))
    return found


def _chosen(call: ModelCall, stack: Sequence[tuple[bytes, list[ModelCall]]]) -> ModelCall | None:
    """The longest of the calls that this one may continue; nothing that was on time continues a late one.

    Of equal ones those that began before it, then those that it may have been given, then the last.
    """
    for _, equal in reversed(stack):
        able = [one for one in equal if call.late or not one.late]
        if able:
            return max(able, key=lambda one: (_order(one) < _order(call), _is_given(one), _order(one)))
    return None


def _is_given(call: ModelCall) -> bool:
    return call.untrainable is None and not call.undelivered


def _forked(call: ModelCall, parent: ModelCall | None, fork: Fork, tokens: Mapping[str, _Tokens]) -> Node:
    parent_id = None if parent is None else parent.id
    if fork.near is None:
        return Node(call, parent_id, fork.reason)
    shared = shared_tokens(tokens[call.id].prompt, tokens[fork.near.id].whole)
    return Node(call, parent_id, fork.reason, fork.near.id, shared)


def _extended(graph: CallGraph) -> set[str]:
    """Calls that a later one goes on with: their responses arrived, whatever the connection looked like."""
    return {
        node.parent
        for node in graph.nodes.values()
        if node.parent is not None
        and not node.call.late
        and _order(graph.nodes[node.parent].call) < _order(node.call)
    }


def _superseded(calls: Sequence[ModelCall], extended: Collection[str]) -> set[str]:
    """Calls that the client's SDK repeated; what was extended had arrived all the same, and stays.

    The same body under the same idempotency key is one request, however often it is made: the last of
    them counts. Without a key the client's count says it: its n-th repetition follows its n-1 earlier ones.
    """
    requests: dict[tuple[bytes, str | None], list[ModelCall]] = {}
    for call in calls:
        requests.setdefault((call.body_hash, call.idempotency_key), []).append(call)
    found: set[str] = set()
    for (_, key), attempts in requests.items():
        repeated = _counted(attempts, extended) if key is None else sorted(attempts, key=_attempt)[:-1]
        found.update(call.id for call in repeated)
    return found


def _attempt(call: ModelCall) -> tuple[int, float, str]:
    return call.retry_count, *_order(call)


def _counted(calls: Sequence[ModelCall], extended: Collection[str]) -> list[ModelCall]:
    """Of calls with the same body those that came again with a higher count.

    Like requests may be made in parallel, and each be repeated. So of those with one count only as many
    are superseded as there are with a higher one: those that failed before the others, the undelivered
    before the delivered. None that began after the last of the higher ones: it is a new request.
    """
    levels: dict[int, list[ModelCall]] = {}
    for call in calls:
        levels.setdefault(call.retry_count, []).append(call)
    found: list[ModelCall] = []
    for count, level in levels.items():
        higher = [later for other, later in levels.items() if other > count]
        if higher:
            last = max(_order(call) for later in higher for call in later)
            able = [call for call in level if call.id not in extended and _order(call) < last]
            found += sorted(able, key=_likely_repeated)[: max(map(len, higher))]
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


def _excluded(call: ModelCall, extended: Collection[str], superseded: Collection[str]) -> str | None:
    if call.untrainable is not None:
        return call.untrainable
    if call.late:
        return LATE
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
