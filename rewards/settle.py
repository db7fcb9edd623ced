"""Settling: once every call of a sealed rollout is parsed, its graph says what may be trained."""

from collections import OrderedDict

from capture.fingerprint import fingerprint_of
from capture.graph import CallGraph, build, fates
from capture.reasons import JUDGE
from capture.store import Store
from capture.types import ModelCall, Rollout
from rewards.judge import SCENARIO
from rewards.trace import Trace, build_trace

SETTLES_PER_STEP = 32
KEPT_MAX = 256


def main_branch(graph: CallGraph, policy: str | None) -> list[ModelCall]:
    """The branch that the script judges, root first: that of the last call of the rollout's policy that
    was answered; where there is none, of the last answered call; else of the last call. Late calls are
    passed over. A judge or a sub-agent on another model is so never mistaken for the agent."""
    calls = [node.call for node in graph.nodes.values() if not node.call.late]
    if not calls:
        return []
    last = max(
        calls, key=lambda call: (call.response is not None, call.policy == policy, call.started_at, call.id)
    )
    return graph.path(last.id)


class Traces:
    """Traces of rollouts that wait for their score; at most `KEPT_MAX`, others are built again."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: OrderedDict[str, Trace] = OrderedDict()

    def keep(self, rollout: Rollout, calls: list[ModelCall], graph: CallGraph) -> None:
        """Build the trace from a graph that is at hand anyway."""
        self._kept[rollout.id] = build_trace(rollout, calls, main_branch(graph, rollout.policy))
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)

    def of(self, rollout: Rollout) -> Trace:
        """The rollout's trace; given out once, then forgotten."""
        kept = self._kept.pop(rollout.id, None)
        if kept is not None:
            return kept
        calls = self._store.calls(rollout.id)
        return build_trace(rollout, calls, main_branch(build(calls), rollout.policy))


class Settler:
    """Settles sealed rollouts all of whose calls are ingested.

    An observed rollout that names no scenario gets its fingerprint; with `passive` it is for training. What a
    reward script's judge asked is set aside: scoring that would ask the judge again, without end.
    """

    def __init__(self, store: Store, traces: Traces, *, keep: bool, passive: bool = False) -> None:
        self._store = store
        self._traces = traces
        self._keep = keep
        self._passive = passive

    def step(self) -> int:
        """Settle some; how many."""
        rollouts = self._store.settleable(SETTLES_PER_STEP)
        for rollout in rollouts:
            calls = self._store.calls(rollout.id)
            graph = build(calls)
            scenario_id = fingerprint_of(calls) if rollout.mode == "observe" else None
            aside = JUDGE if rollout.mode == "observe" and rollout.scenario_id == SCENARIO else None
            self._store.settle(
                rollout.id, fates(graph), scenario_id=scenario_id, passive=self._passive, aside=aside
            )
            if self._keep and aside is None:
                self._traces.keep(rollout, calls, graph)
        return len(rollouts)
