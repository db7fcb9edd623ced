"""The sentence that says what training waits for, case by case, and the screen around it."""

from typing import Any

import pytest

from capture.store import Counts
from capture.types import Balance, EngineVersion, Promotion, StepRow, Version
from hone.promotion import moment, standing
from hone.state import PartStatus, State
from hone.status import RunView, Status, balance_line, groups_per_batch, render, waiting_for


def counts(**some: Any) -> Counts:
    empty: dict[str, Any] = {
        "rollouts": {},
        "groups": {},
        "batches": {},
        "calls": 0,
        "calls_not_ingested": 0,
        "failed_calls": 0,
        "drops": {},
        "untrainable": {},
    }
    return Counts(**{**empty, **some})


def supervisor(kind: Any = "train", **parts: str) -> State:
    listed = [
        PartStatus(
            name=name, state=state, log=f"/logs/{name}.log", exit_code=-9 if state == "backoff" else None
        )
        for name, state in parts.items()
    ]
    return State(kind=kind, pid=1, pid_ticks=1, started_at=0.0, config="hone.toml", parts=listed)


ALL = {"engine": "ready", "proxy": "ready", "control": "ready", "learn": "ready", "runner": "ready"}
RUN = RunView(id="a", ended=False, step=4, groups_per_batch=8)
ENDED = RunView(id="a", ended=True, step=1, groups_per_batch=8)

CASES = [
    ([], RUN, counts(), "Nothing runs here: start with `hone up` or `hone train`."),
    (
        [supervisor("up", engine="starting", proxy="waiting", control="waiting")],
        None,
        None,
        "Training waits for engine, which is starting.",
    ),
    (
        [supervisor(**{**ALL, "proxy": "backoff"})],
        RUN,
        counts(),
        "Training waits for proxy, which died (signal 9) and is started again: see /logs/proxy.log.",
    ),
    (
        [supervisor(**{**ALL, "learn": "failed"})],
        RUN,
        counts(),
        "Training stopped: learn died too often (no exit code); see /logs/learn.log.",
    ),
    (
        [supervisor(**{**ALL, "runner": "waiting"})],
        RUN,
        counts(),
        "Training waits for runner, which has not started.",
    ),
    (
        [supervisor("up", engine="ready", proxy="ready", control="ready")],
        RUN,
        counts(),
        "Serving without training: `hone train` starts it.",
    ),
    ([supervisor(**ALL)], None, counts(), "Serving without training: `hone train` starts it."),
    ([supervisor(**ALL)], ENDED, counts(), "Run a has ended after 1 step."),
    (
        [supervisor(**ALL)],
        RUN,
        counts(groups={"taken": 8, "closed": 9}, rollouts={"open": 3}),
        "Training is at work: the learner holds 8 groups.",
    ),
    (
        [supervisor(**ALL)],
        RUN,
        counts(groups={"closed": 9}, rollouts={"open": 3}),
        "Training waits for the learner to take 9 closed groups.",
    ),
    (
        [supervisor(**ALL)],
        RUN,
        counts(groups={"closed": 2, "open": 6}, rollouts={"open": 1, "sealed": 4}),
        "Training waits for agents: 1 rollout running, 2 of 8 groups ready.",
    ),
    (
        [supervisor(**ALL)],
        RUN,
        counts(groups={"open": 8}, rollouts={"sealed": 2, "ingested": 1}, calls_not_ingested=40),
        "Training waits for ingest: 2 finished rollouts, 40 calls to read, 0 of 8 groups ready.",
    ),
    (
        [supervisor(**ALL)],
        RUN,
        counts(groups={"open": 1}, rollouts={"ingested": 1}),
        "Training waits for the reward script: 1 rollout without a score, 0 of 8 groups ready.",
    ),
    (
        [supervisor(**ALL)],
        RUN,
        counts(groups={"open": 1}, rollouts={"scored": 8}),
        "Training waits for 1 open group to close, 0 of 8 groups ready.",
    ),
    (
        [supervisor(**ALL)],
        RUN,
        counts(rollouts={"reward_error": 16}),
        "Training waits for rewards: the script failed on 16 rollouts.",
    ),
    (
        [supervisor(**ALL)],
        RUN,
        counts(groups={"trained": 32}, rollouts={"trained": 256}),
        "Training waits for the runner to start agents, 0 of 8 groups ready.",
    ),
    (
        [
            supervisor("up", engine="ready", proxy="ready", control="ready"),
            supervisor(learn="ready", runner="done"),
        ],
        RUN,
        counts(groups={"taken": 1}),
        "Training is at work: the learner holds 1 group.",
    ),
]


@pytest.mark.parametrize(
    ("supervisors", "run", "seen", "sentence"), CASES, ids=[case[3][:50] for case in CASES]
)
def test_what_training_waits_for(
    supervisors: list[State], run: RunView | None, seen: Counts | None, sentence: str
) -> None:
    assert waiting_for(supervisors, run, seen) == sentence


def test_groups_per_batch_is_read_from_the_runs_settings() -> None:
    assert groups_per_batch({"train": {"groups_per_batch": 32}}) == 32
    assert groups_per_batch({}) == 1


def test_the_balance_is_one_line() -> None:
    balance = Balance(
        sampled=100,
        trained=50,
        zero_advantage=10,
        dropped={"stale": 5, "run_ended": 15},
        untrainable={},
        not_for_training={"eval": 20},
        pending=0,
    )
    assert balance_line(balance) == (
        "100 sampled = 50 trained + 10 zero advantage + 20 dropped (15 run_ended, 5 stale)"
        " + 20 not for training (20 eval) + 0 pending"
    )
    off = Balance(3, 1, 0, {}, {}, {}, 1)
    assert balance_line(off) == "3 sampled ≠ 1 trained + 0 zero advantage + 1 pending"


def numbered(version: int) -> Version:
    """An active version."""
    return Version(
        policy="player",
        version=version,
        lineage="l",
        parent=version - 1,
        step=version,
        state="active",
        path="/a",
        sha256="x",
        created_at=0.0,
    )


def test_one_screen() -> None:
    version = numbered(7)
    status = Status(
        waiting_for="Training waits for agents.",
        supervisors=[supervisor(engine="ready", learn="backoff")],
        run=RunView(
            id="a",
            ended=False,
            step=4,
            groups_per_batch=8,
            last=StepRow(
                run_id="a", batch_id="b", step=4, version=7, committed_at=0.0, metrics={"reward_mean": 0.5}
            ),
        ),
        policy="player",
        active=version,
        engines=[
            EngineVersion(engine="e1", policy="player", version=6, state="verified", at=1.0),
            EngineVersion(engine="e1", policy="player", version=7, state="loaded", at=2.0),
        ],
        counts=counts(rollouts={"open": 2, "trained": 64}, groups={"trained": 8}, calls=300, failed_calls=1),
    )
    assert render(status).splitlines() == [
        "Training waits for agents.",
        "",
        "hone train (pid 1)",
        "  engine    ready",
        "  learn     backoff",
        "",
        "run a: step 4, player active v7",
        "  engine e1: v7 loaded",
        "  rollouts  2 open, 64 trained",
        "  groups    8 trained",
        "  calls     300, 1 failed",
        "  last step 4 (v7): reward_mean 0.5",
    ]


def test_what_is_served_and_what_was_asked_for() -> None:
    version = numbered(3)

    def newest(**fields: Any) -> Promotion:
        return Promotion(n=2, policy="player", version=5, kind="promote", asked_at=1e9, **fields)

    assert standing(version, None) is None
    served = Promotion(
        n=1, policy="player", version=3, kind="rollback", asked_at=1e9, served_at=1e9 + 1, replaced=5
    )
    assert standing(version, served) == f"v3 since {moment(1e9 + 1)}, before it v5"
    assert standing(version, newest()) == "v3; v5 is asked for and served once an engine has proved it"
    assert standing(version, newest(reason="e: gone")) == "v3; v5 was not promoted: e: gone"
    run = RunView(id="a", ended=False, step=4, groups_per_batch=8)
    status = Status(
        waiting_for=".", run=run, policy="player", active=version, promoted=version, promotion=served
    )
    assert render(status).splitlines()[2:] == [
        "run a: step 4, player active v3, promoted v3",
        f"  promoted  v3 since {moment(1e9 + 1)}, before it v5",
    ]
