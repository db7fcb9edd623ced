"""Thresholds and tables of the demonstration, on figures made by hand."""

from typing import Any

import msgspec
import pytest

from capture.types import Rollout, StepRow, Version
from hone.counters import client_failures, engine_failures
from hone.evidence import adapters, mismatch, trained_versions
from hone.summary import (
    Adapters,
    Column,
    FailedRequests,
    Games,
    Mismatch,
    Summary,
    Tokens,
    exactness_misses,
    flat,
    games_of,
    misses,
    table,
)

GOOD = Summary(
    before=Column(
        random=Games(wins=64, draws=36, losses=100, invalid=60),
        optimal=Games(wins=0, draws=20, losses=180, invalid=60),
    ),
    after=Column(
        random=Games(wins=124, draws=36, losses=40, invalid=10),
        optimal=Games(wins=0, draws=60, losses=140, invalid=20),
        version=80,
    ),
    positions=300,
    positions_seen_share=0.9,
    steps=80,
    rollouts=21_000,
    calls=90_000,
    wall_s=600.0,
    cold_s=40.0,
    adapters=Adapters(
        published=80, activated=80, activated_in_flight=20, sampled_from=78, qualified=20, indistinguishable=2
    ),
    failed_requests=FailedRequests(client=0, engine=0, agent=0),
    mismatch=Mismatch(
        max_abs_logprob_diff=1e-3,
        mean_abs_logprob_diff=1e-6,
        compared_tokens=50,
        trained_tokens=1000,
        versions_trained_on=80,
        versions_skipped=0,
        wrong_adapter_diff=0.01,
    ),
    tokens=Tokens(
        sampled=1500,
        trained=1000,
        zero_advantage=500,
        dropped={},
        untrainable={},
        not_for_training={},
        pending=0,
        exact=True,
    ),
    rollouts_in_ledger_twice=0,
)


def with_(**changes: Any) -> Summary:
    """GOOD with `a__b=value` set deep inside."""
    summary: Any = GOOD
    for path, value in changes.items():
        names = path.split("__")
        structs = [summary]
        for name in names[:-1]:
            structs.append(getattr(structs[-1], name))
        for struct, name in zip(reversed(structs), reversed(names), strict=True):
            value = msgspec.structs.replace(struct, **{name: value})
        summary = value
    return summary


def test_figures_exactly_at_their_thresholds_miss_nothing() -> None:
    assert misses(GOOD) == []


CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"before__optimal__losses": 180, "before__optimal__draws": 19},
        "before.optimal: 199 games, 200 are needed",
    ),
    (
        {"after__random__wins": 123, "after__random__losses": 41},
        "wins against random: +29.5 points, +30 are needed",
    ),
    (
        {"after__optimal__draws": 59, "after__optimal__losses": 141},
        "draws against optimal: +19.5 points, +20 are needed",
    ),
    ({"after__random__invalid": 11}, "invalid games: 31 after 120, at most a quarter is allowed"),
    (
        {"adapters__qualified": 19},
        "adapters activated: 19 under traffic and sampled from (of 80), 20 are needed",
    ),
    ({"adapters__indistinguishable": 3}, "indistinguishable adapters: 3, at most 2"),
    (
        {"mismatch__max_abs_logprob_diff": 0.0011},
        "engine against learner: 0.0011 nats apart, at most 0.001",
    ),
    (
        {"mismatch__max_abs_logprob_diff": float("nan"), "mismatch__wrong_adapter_diff": 1.0},
        "engine against learner: nan nats apart, at most 0.001",
    ),
    ({"mismatch__compared_tokens": 49}, "compared tokens: 4.9% of the trained ones, 5% are needed"),
    (
        {"mismatch__versions_skipped": 2},
        "compared tokens: in 2 batches not from every version trained on",
    ),
    ({"mismatch__wrong_adapter_diff": None}, "wrong adapter: never compared"),
    (
        {"mismatch__wrong_adapter_diff": 1e-3},
        "wrong adapter: 0.001 nats apart, no more than the right one",
    ),
    ({"tokens__exact": False}, "token balance: the terms do not add up to the sampled tokens"),
    ({"tokens__pending": 7}, "token balance: 7 tokens pending"),
    ({"rollouts_in_ledger_twice": 1}, "ledger: 1 rollouts stand in it twice"),
    ({"store_faults": ["a call without a frame"]}, "store: a call without a frame"),
    ({"failed_requests__agent": 3}, "failed calls: agents saw 3, none is allowed"),
]


@pytest.mark.parametrize(("changes", "miss"), CASES, ids=[miss[:40] for _, miss in CASES])
def test_each_miss_is_named_and_alone(changes: dict[str, Any], miss: str) -> None:
    found = misses(with_(**changes))
    assert miss in found
    assert len(found) == 1


def test_failures_and_their_disagreement_are_two_misses() -> None:
    assert misses(with_(failed_requests__client=2, failed_requests__engine=2)) == [
        "failed requests: 2, none is allowed"
    ]
    assert misses(with_(failed_requests__client=2)) == [
        "failed requests: the proxy counted 2, the engine 0",
        "failed requests: 2, none is allowed",
    ]


def test_a_short_run_needs_exactness_only() -> None:
    short = with_(adapters__qualified=2, after__random__wins=64, after__random__losses=100)
    assert misses(short)
    assert exactness_misses(short) == []
    assert exactness_misses(with_(tokens__pending=1)) == ["token balance: 1 tokens pending"]


def test_headline_figures_stand_on_top() -> None:
    written = flat(GOOD)
    assert written["adapters_activated"] == 20
    assert written["failed_requests"] == 0
    assert written["max_abs_logprob_diff"] == 1e-3
    assert written["compared_tokens"] == 50
    assert written["sampled_tokens"] == 1500
    assert written["rollouts_in_ledger_twice"] == 0
    assert written["before"] == {
        "random": {"wins": 64, "draws": 36, "losses": 100, "invalid": 60},
        "optimal": {"wins": 0, "draws": 20, "losses": 180, "invalid": 60},
        "version": 0,
    }
    assert written["misses"] == []


def test_the_table_has_wilsons_intervals() -> None:
    lines = table(GOOD).splitlines()
    assert lines[1].split() == ["before", "(v0)", "32/18/50,", "30", "invalid", "0/10/90,", "30", "invalid"]
    assert lines[2].split() == ["after", "(v80)", "62/18/20,", "5", "invalid", "0/30/70,", "10", "invalid"]
    # p = 100/200: (0.5 + z²/400 ± z √(0.25/200 + z²/160000)) / (1 + z²/200), z = 1.959964
    losses = next(line for line in lines if line.split()[:2] == ["before", "losses"])
    assert "50.0 [ 43.1,  56.9]" in losses


def test_games_are_counted_from_named_scores() -> None:
    scores = [
        {"win": 1.0, "draw": 0.0, "loss": 0.0, "invalid": 0.0},
        {"win": 0.0, "draw": 0.0, "loss": 1.0, "invalid": 1.0},
        {"win": 0.0, "draw": 1.0, "loss": 0.0, "invalid": 1.0},
        {},
    ]
    games = games_of(scores)
    assert games == Games(wins=1, draws=1, losses=1, invalid=2)
    assert games.games == 3
    assert games.points("wins") == pytest.approx(100 / 3)


PROXY = """
# TYPE hone_upstream_attempts_total counter
hone_upstream_attempts_total{route="policy",outcome="ok"} 900.0
hone_upstream_attempts_total{route="policy",outcome="broken"} 2.0
hone_upstream_attempts_total{route="*",outcome="broken"} 1.0
hone_upstream_attempts_total{route="*",outcome="hung_up"} 0.0
# TYPE hone_swap_failures_total counter
hone_swap_failures_total{stage="load"} 1.0
"""

VLLM = """
# TYPE http_requests_total counter
http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 900.0
http_requests_total{handler="/v1/chat/completions",method="POST",status="5xx"} 3.0
http_requests_total{handler="/nothing",method="GET",status="4xx"} 8.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop"} 890.0
vllm:request_success_total{engine="0",finished_reason="abort"} 1.0
"""


def test_both_sides_counters_are_read() -> None:
    assert client_failures(PROXY) == {"broken": 3, "swap_load": 1}
    assert engine_failures(VLLM) == {"http_5xx": 3, "abort": 1}
    assert client_failures("") == engine_failures("") == {}


def version(number: int, sha: str | None, activated: bool = True) -> Version:
    return Version(
        policy="p",
        version=number,
        lineage="l",
        parent=None,
        step=number,
        state="active",
        path=None,
        sha256=sha,
        created_at=0.0,
        activated_at=1.0 if activated else None,
    )


def rollout(number: int, policy_version: int, **some: Any) -> Rollout:
    defaults: dict[str, Any] = {"state": "trained", "call_count": 4, "batch_id": "b1", "group_id": "g1"}
    return Rollout(
        id=f"r{number}", key_id="k", mode="train", policy_version=policy_version, **{**defaults, **some}
    )


def test_adapters_are_counted_by_their_weights() -> None:
    versions = [
        version(0, None),  # the base: not an adapter
        version(1, "a"),
        version(2, "b"),
        version(3, "b"),  # the same weights again
        version(4, "c"),
        version(5, "d", activated=False),
    ]
    swaps = [
        {"version": 1, "in_flight": 3, "states": ["verified"]},
        {"version": 2, "in_flight": 1, "states": ["indistinguishable"]},
        {"version": 4, "in_flight": 0, "states": ["verified"]},
    ]
    rollouts = [rollout(1, 0), rollout(2, 1), rollout(3, 3), rollout(4, 4, call_count=0)]
    assert adapters(versions, swaps, rollouts) == Adapters(
        published=4,  # a b c d
        activated=3,  # a b c
        activated_in_flight=2,  # a b
        sampled_from=2,  # a, and b as version 3
        qualified=1,  # version 1: version 2 had traffic, version 3 had calls
        indistinguishable=1,
    )


def step(batch: str, **metrics: float) -> StepRow:
    return StepRow(run_id="r", batch_id=batch, step=1, version=1, committed_at=0.0, metrics=metrics)


def test_mismatch_is_summed_over_batches() -> None:
    steps = [
        step("b1", mismatch_max=2e-6, mismatch_mean=1e-6, mismatch_tokens=10.0, mismatch_versions=1.0),
        step(
            "b2",
            mismatch_max=4e-6,
            mismatch_mean=2e-6,
            mismatch_tokens=30.0,
            mismatch_versions=2.0,
            mismatch_wrong_adapter_max=0.5,
        ),
        step("b3", mismatch_max=0.0, mismatch_mean=0.0, mismatch_tokens=0.0, mismatch_wrong_adapter_max=0.25),
        step(
            "b4", mismatch_max=1e-6, mismatch_mean=0.0, mismatch_tokens=10.0, mismatch_wrong_adapter_max=0.4
        ),
    ]
    rollouts = [
        rollout(1, 1, reward=1.0),
        rollout(2, 2, reward=0.0),  # b1 trained on versions 1 and 2, but only one was compared
        rollout(3, 3, reward=1.0, batch_id="b2"),
        rollout(4, 4, reward=1.0, batch_id="b2"),  # no advantage: not trained on
        rollout(5, 5, state="dropped", reward=0.0),
    ]
    assert trained_versions(rollouts) == {"b1": {1, 2}}
    found = mismatch(steps, rollouts, trained_tokens=500)
    assert found.max_abs_logprob_diff == 4e-6
    assert found.mean_abs_logprob_diff == pytest.approx((10 * 1e-6 + 30 * 2e-6) / 50)
    assert found.compared_tokens == 50
    assert found.compared_share == pytest.approx(0.1)
    assert found.versions_trained_on == 2
    assert found.versions_skipped == 1
    assert found.wrong_adapter_diff == 0.4
