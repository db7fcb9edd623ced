"""The call graph: which call continues which, who owns a sampled token, what may be trained.

Pure, and a function of the *set* of calls: in which order they arrived changes nothing. B continues
A when B's prompt is exactly A's prompt + sampled tokens and more (of several such A the longest);
otherwise B begins a branch of its own, for a reason that is recorded. Late calls are kept but change
nothing: what was settled without them stays true.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from capture.normalise import conversation_key
from capture.reasons import SUPERSEDED, UNDELIVERED
from capture.types import CallFate, ModelCall, Sample, Span

ROOT: Final = "root"
NO_TOKENS: Final = "no_tokens"
RETOKENISED: Final = "retokenised"
STRIPPED_REASONING: Final = "stripped_reasoning"
CHANGED_TOOLS: Final = "changed_tools"
NEW_SYSTEM_PROMPT: Final = "new_system_prompt"
REWRITTEN_HISTORY: Final = "rewritten_history"

FORKS: Final[dict[str, str]] = {
    ROOT: "It begins a conversation of its own.",
    NO_TOKENS: "Its prompt tokens are not known.",
    RETOKENISED: "It goes on with the same messages, but their tokens are not the sampled ones.",
    STRIPPED_REASONING: "It goes on with the same messages, without the reasoning that was sampled.",
    CHANGED_TOOLS: "The tools in the prompt changed.",
    NEW_SYSTEM_PROMPT: "The system prompt changed.",
    REWRITTEN_HISTORY: "Earlier messages were changed, shortened or left out.",
}
"""Why a call continues no earlier one -> sentence."""


class Node(msgspec.Struct, frozen=True):
    """A call and its place; exactly one of ``parent`` and ``fork`` is set."""

    call: ModelCall
    parent: str | None  # id of the call that it continues
    fork: str | None  # a reason from FORKS


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
    told: list[_Told] = []  # of the calls so far; put in normal form only once a fork asks for it
    nodes: dict[str, Node] = {}
    for index, call in enumerate(ordered):
        parent = _parent(call, candidates)
        if parent is not None:
            nodes[call.id] = Node(call, parent.id, None)
            continue
        told += [_Told.of(one) for one in ordered[len(told) : index]]
        nodes[call.id] = Node(call, None, _fork(call, told))
    return CallGraph(nodes)


def fates(graph: CallGraph) -> list[CallFate]:
    """For each call, in order, why its tokens are not trained; None where they are."""
    extended = {node.parent for node in graph.nodes.values() if not node.call.late}
    retries: dict[bytes, list[ModelCall]] = {}
    for node in graph.nodes.values():
        if not node.call.late:
            retries.setdefault(node.call.body_hash, []).append(node.call)
    return [
        CallFate(call_id, _excluded(node.call, call_id in extended, retries))
        for call_id, node in graph.nodes.items()
    ]


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
        _Candidate(_packed(call.prompt_ids + call.sampled_ids), call)
        for call in calls
        if call.prompt_ids and call.sampled_ids and not call.late
    ]
    return sorted(found, key=lambda one: len(one.tokens), reverse=True)


def _parent(call: ModelCall, candidates: Sequence[_Candidate]) -> ModelCall | None:
    """The longest call that this one's prompt extends; of equal ones the last that began before it."""
    prompt = _packed(call.prompt_ids)
    equal: list[_Candidate] = []
    for one in candidates:
        if equal and len(one.tokens) < len(equal[0].tokens):
            break
        if prompt.startswith(one.tokens):
            equal.append(one)
    found = [one.call for one in equal]
    return max(found, key=lambda one: (_order(one) < _order(call), _order(one)), default=None)


def _packed(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()


Keys = list[tuple[Any, ...]]


class _Told(msgspec.Struct, frozen=True):
    """What a call's messages say, in normal form."""

    call: ModelCall
    asked: Keys  # the request's messages
    whole: Keys  # and the response

    @classmethod
    def of(cls, call: ModelCall) -> "_Told":
        asked = conversation_key(call.messages)
        return cls(call, asked, asked + conversation_key([call.response] if call.response else []))


def _fork(call: ModelCall, earlier: Sequence[_Told]) -> str:
    """Why the call continues none of the calls before it, judged by its messages."""
    if not call.prompt_ids:
        return NO_TOKENS
    if not earlier:
        return ROOT
    mine = _Told.of(call)
    reasons = {_difference(mine, other) for other in earlier if other.call.prompt_ids}
    return next((reason for reason in FORKS if reason in reasons and reason != ROOT), ROOT)


def _difference(told: _Told, other: _Told) -> str:
    """Why one call's prompt does not extend another's tokens; `ROOT` if they have nothing to do."""
    if told.asked[: len(other.whole)] == other.whole:
        if told.call.tools != other.call.tools:
            return CHANGED_TOOLS
        return STRIPPED_REASONING if _reasoned(other.call) else RETOKENISED
    if told.asked == other.whole[: len(told.asked)]:
        return ROOT  # the same conversation, not gone on with: a repeated or parallel call
    mine, theirs = _without_system(told.asked), _without_system(other.asked)
    if not mine or not theirs or mine[0] != theirs[0]:
        return ROOT
    return REWRITTEN_HISTORY if told.asked[0] == other.asked[0] else NEW_SYSTEM_PROMPT


def _reasoned(call: ModelCall) -> bool:
    response = call.response or {}
    return bool(response.get("reasoning") or response.get("reasoning_content"))


def _without_system(keys: Keys) -> Keys:
    return [key for key in keys if key[0] not in ("system", "developer")]


def _excluded(call: ModelCall, extended: bool, retries: dict[bytes, list[ModelCall]]) -> str | None:
    if call.untrainable is not None:
        return call.untrainable
    if extended:
        return None
    if any(
        retry.retry_count > call.retry_count and retry.prompt_ids == call.prompt_ids
        for retry in retries.get(call.body_hash, ())
    ):
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
