"""The summary of a demonstration, computed from the store alone."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from capture.errors import NotFound
from capture.store import Store
from capture.types import Rollout, StepRow, Version
from hone.summary import (
    Adapters,
    Column,
    FailedRequests,
    Mismatch,
    Summary,
    Tokens,
    games_of,
)

EVAL, REQUESTS, TIMES = "eval", "requests", "times"  # kinds of metrics rows that a demonstration writes
SWAP = "swap"  # and the one that the proxy writes at each activation
PAGE = 1000


def summarise(store: Store, run_id: str) -> Summary:
    """Read everything; `NotFound` if the demonstration did not come to its end."""
    policy = store.lineage(run_id).policy
    steps = store.steps(run_id)
    rollouts = list(pages(store, run_id))
    balance = store.balance(policy)
    evals = store.get_metrics(run_id, EVAL)
    seen_share, positions = seen(store, rollouts, evals)
    times = last(store, run_id, TIMES)
    return Summary(
        before=column(store, evals, "before"),
        after=column(store, evals, "after"),
        positions=positions,
        positions_seen_share=seen_share,
        steps=steps[-1].step if steps else 0,
        rollouts=len(rollouts),
        calls=sum(rollout.call_count for rollout in rollouts),
        wall_s=times["wall_s"],
        cold_s=times["cold_s"],
        adapters=adapters(store.versions(policy), store.get_metrics(run_id, SWAP), rollouts),
        failed_requests=failed_requests(store, run_id),
        mismatch=mismatch(steps, rollouts, balance.trained),
        tokens=Tokens(
            sampled=balance.sampled,
            trained=balance.trained,
            zero_advantage=balance.zero_advantage,
            dropped=balance.dropped,
            untrainable=balance.untrainable,
            not_for_training=balance.not_for_training,
            pending=balance.pending,
            exact=balance.exact,
        ),
        rollouts_in_ledger_twice=store.ledger_twice(),
        store_faults=store.verify(),
    )


def pages(store: Store, run_id: str) -> Iterator[Rollout]:
    """Every rollout of the run, evaluations included."""
    after: str | None = None
    while page := store.rollouts(run_id=run_id, limit=PAGE, after=after):
        yield from page
        after = page[-1].id


def last(store: Store, run_id: str, kind: str) -> dict[str, Any]:
    """The newest metrics row of a kind."""
    rows = store.get_metrics(run_id, kind)
    if not rows:
        raise NotFound(f"run {run_id} has no row {kind!r}: the demonstration did not come to its end")
    return rows[-1]


def column(store: Store, evals: Sequence[Mapping[str, Any]], name: str) -> Column:
    """One version against both opponents."""
    rows = {row["opponent"]: row for row in evals if row["name"] == name}
    if set(rows) != {"random", "optimal"}:
        raise NotFound(f"there is no evaluation {name!r} against both opponents")
    games = {
        opponent: games_of(store.rollout(rollout_id).scores for rollout_id in row["rollouts"])
        for opponent, row in rows.items()
    }
    return Column(random=games["random"], optimal=games["optimal"], version=rows["random"]["version"])


def adapters(
    versions: Sequence[Version], swaps: Sequence[Mapping[str, Any]], rollouts: Sequence[Rollout]
) -> Adapters:
    """Count distinct weights by what became of them; `swaps` are the activator's notes."""
    hashes = {version.version: version.sha256 for version in versions if version.sha256}
    activated = {v.version for v in versions if v.activated_at is not None} & set(hashes)
    in_flight = {swap["version"] for swap in swaps if swap["in_flight"] > 0} & activated
    sampled = {
        r.policy_version for r in rollouts if r.call_count and r.policy_version is not None
    } & activated
    dull = {swap["version"] for swap in swaps if "indistinguishable" in swap["states"]} & set(hashes)

    def distinct(numbers: set[int]) -> int:
        return len({hashes[number] for number in numbers})

    return Adapters(
        published=distinct(set(hashes)),
        activated=distinct(activated),
        activated_in_flight=distinct(in_flight),
        sampled_from=distinct(sampled),
        qualified=distinct(in_flight & sampled),
        indistinguishable=distinct(dull),
    )


def failed_requests(store: Store, run_id: str) -> FailedRequests:
    """The counts that both sides gave before they were stopped."""
    row = last(store, run_id, REQUESTS)
    client: dict[str, int] = row["client"]
    engine: dict[str, int] = row["engine"]
    return FailedRequests(
        client=sum(client.values()),
        engine=sum(engine.values()),
        agent=store.counts(run_id).failed_calls,
        client_detail=client,
        engine_detail=engine,
    )


def mismatch(steps: Sequence[StepRow], rollouts: Sequence[Rollout], trained_tokens: int) -> Mismatch:
    """Over all batches; the wrong adapter counts with the comparison that it came off best in."""
    rows = [step.metrics for step in steps if step.metrics.get("mismatch_tokens")]
    compared = sum(int(row["mismatch_tokens"]) for row in rows)
    total = sum(row["mismatch_mean"] * row["mismatch_tokens"] for row in rows)
    wrong = [row["mismatch_wrong_adapter_max"] for row in rows if "mismatch_wrong_adapter_max" in row]
    by_batch = trained_versions(rollouts)
    looked_at = {step.batch_id: step.metrics.get("mismatch_versions", 0.0) for step in steps}
    return Mismatch(
        max_abs_logprob_diff=max((row["mismatch_max"] for row in rows), default=float("nan")),
        mean_abs_logprob_diff=total / compared if compared else float("nan"),
        compared_tokens=compared,
        trained_tokens=trained_tokens,
        versions_trained_on=len(set().union(*by_batch.values())),
        versions_skipped=sum(looked_at.get(batch, 0.0) < len(found) for batch, found in by_batch.items()),
        wrong_adapter_diff=min(wrong, default=None),
    )


def trained_versions(rollouts: Sequence[Rollout]) -> dict[str, set[int]]:
    """Batch -> versions that sampled tokens with an advantage in it."""
    groups: dict[tuple[str, str | None], list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.state == "trained" and rollout.batch_id is not None:
            groups[rollout.batch_id, rollout.group_id].append(rollout)
    found: dict[str, set[int]] = defaultdict(set)
    for (batch, _), members in groups.items():
        mean = statistics.fmean(member.reward or 0.0 for member in members)
        for member in members:
            if member.policy_version is not None and abs((member.reward or 0.0) - mean) > 1e-9:
                found[batch].add(member.policy_version)
    return dict(found)


def seen(store: Store, rollouts: Sequence[Rollout], evals: Sequence[Mapping[str, Any]]) -> tuple[float, int]:
    """Of the positions in the evaluation after training: the share met in training, and their number.

    A position is the text of the last message before the model's answer.
    """
    asked = {
        text
        for row in evals
        if row["name"] == "after"
        for r in row["rollouts"]
        for text in last_texts(store, r)
    }
    unseen = set(asked)
    for rollout in rollouts:
        if not unseen:
            break
        if rollout.mode == "train" and rollout.call_count:
            unseen -= last_texts(store, rollout.id)
    return (1.0 - len(unseen) / len(asked) if asked else 0.0), len(asked)


def last_texts(store: Store, rollout_id: str) -> set[str]:
    """The last message of each call's request."""
    return {str(call.messages[-1].get("content")) for call in store.calls(rollout_id) if call.messages}
