"""Why did this rollout not train? Every kind of sentence, told of rollouts in a real store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from capture_makers import POLICY, model_call, request, response, rollout
from explain_world import RUN, World, sections

from capture.errors import Conflict, NotFound
from capture.graph import FORKS
from capture.reasons import UNTRAINABLE
from capture.sqlite import SqliteStore
from hone.explain.explanation import explain
from hone.explain.facts import ROOT
from hone.explain.look import look
from hone.explain.words import SETTINGS, error_line, sentence_of

CONTROL = "; no control runs now: `hone up` starts it"
LEARNER = "; no learner runs now: `hone train` starts one"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_of(tmp_path) as opened:
        yield opened


@contextmanager
def world_of(folder: Path, **settings: Any) -> Iterator[World]:
    """A world whose store holds at the end everything that a store must."""
    store = SqliteStore(folder / "hone.db")
    yield World(store, **settings)
    assert store.verify() == []
    store.close()


# -- trained ---------------------------------------------------------------------------------------


def test_trained_whole(world: World) -> None:
    world.played("r_a", 1.0)
    world.played("r_b", 0.0)
    world.group()
    batch, _ = world.train()
    assert world.why("r_a") == (
        f"Trained: all 5 sampled tokens in batch {batch} (step 1, which made v1), advantage +0.5.",
        None,
    )
    told = world.explain("r_b")
    assert told.kind == "trained"
    assert told.sentence.endswith("advantage -0.5.")
    assert (told.tokens.sampled, told.tokens.trained, told.staleness) == (5, 5, 0)
    assert [moment.what for moment in told.timeline] == [
        "opened in mode train, pinned to v0",
        "first call began",
        "last call ended",
        "sealed as completed",
        "scored: reward 0",
        "group closed on 2 members",
        f"taken in batch {batch} with 1 group",
        "batch committed at step 1, v1 made",
    ]
    assert told.group is not None
    assert [(member.id, member.reward, member.advantage, member.this) for member in told.group.members] == [
        ("r_a", 1.0, 0.5, False),
        ("r_b", 0.0, -0.5, True),
    ]


def test_trained_but_for_a_call(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [1, 2], [3, 4])
    world.call("r_a", [1, 2, 3, 4, 5], [6], request=request(tool_choice="required"))
    world.finish("r_a")
    world.ingest()
    world.score("r_a", 1.0)
    world.played("r_b", 0.0)
    world.group()
    batch, _ = world.train()
    assert world.why("r_a") == (
        f"Trained: 2 of 3 sampled tokens in batch {batch} (step 1, which made v1), advantage +0.5; 1 token "
        "of call 2 (grammar) was not: a grammar (forced tool choice, response format, structured output) "
        "masked the sampling (sampling.grammar = honour).",
        "sampling.grammar",
    )


def test_all_rewards_equal(world: World) -> None:
    world.played("r_a", 0.25)
    world.played("r_b", 0.25)
    world.group()
    batch, version = world.train()
    assert version is None
    assert world.why("r_a") == (
        f"Not trained: in batch {batch} (step 0, no new version) all 2 rewards of its group were 0.25, so "
        "there was nothing to prefer and the advantage was 0; scenarios that sometimes succeed help, or a "
        "larger group (train.group_size = 2).",
        "train.group_size",
    )
    assert world.explain("r_a").kind == "zero_variance"


def test_the_mean_of_its_group(world: World) -> None:
    for id, reward in (("r_a", 0.0), ("r_b", 0.5), ("r_c", 1.0)):
        world.played(id, reward, size=3)
    world.group()
    batch, _ = world.train()
    assert world.why("r_b") == (
        f"Not trained: in batch {batch} (step 1, which made v1) its reward 0.5 was its group's mean, so its "
        "advantage was 0.",
        None,
    )
    assert world.explain("r_b").tokens.zero_advantage == 5


# -- no token that may be trained ------------------------------------------------------------------


@pytest.mark.parametrize("reason", UNTRAINABLE)
def test_every_untrainable_reason_is_told(world: World, reason: str) -> None:
    world.open("r_a")
    world.call("r_a", [1, 2], [3, 4])
    call = model_call("r_a", id="c_r_a_1", untrainable=reason, late=False)
    world.store.save_calls([call], {})
    world.finish("r_a")
    world.ingest()
    sentence, setting = world.why("r_a")
    assert setting == SETTINGS.get(reason)
    assert sentence.startswith(
        f"Not trained: none of its sampled tokens may be trained: 2 tokens of call 1 ({reason}) were not: "
        f"{sentence_of(reason)}"
    )
    assert setting is None or f"({setting}" in sentence
    assert world.explain("r_a").kind == "no_tokens"
    assert world.explain("r_a").tokens.untrainable == {reason: 2}


def test_a_reason_that_nobody_told_us_of_is_told_as_it_is(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [1, 2], [3, 4])
    world.store.save_calls([model_call("r_a", id="c_r_a_1", untrainable="cursed")], {})
    world.finish("r_a")
    world.ingest()
    assert world.why("r_a")[0] == (
        "Not trained: none of its sampled tokens may be trained: 2 tokens of call 1 (cursed) were not: "
        "cursed."
    )


def test_nothing_to_train_is_told_before_and_after_its_batch(world: World) -> None:
    for id, reward in (("r_a", 1.0), ("r_b", 0.0)):
        world.open(id)
        world.call(id, [1, 2], [3, 4], request=request(response_format={"type": "json_object"}))
        world.finish(id)
        world.ingest()
        world.score(id, reward)
    none = "none of its sampled tokens may be trained: 2 tokens of call 1 (grammar) were not: a grammar "
    none += "(forced tool choice, response format, structured output) masked the sampling "
    none += "(sampling.grammar = honour)."
    assert world.why("r_a") == (f"Not trained: {none}", "sampling.grammar")
    world.group()
    assert world.why("r_a") == (f"Not trained: {none}", "sampling.grammar")
    batch, _ = world.train()
    assert world.why("r_a") == (
        f"Not trained: it was in batch {batch} (step 1, which made v1), but {none}",
        "sampling.grammar",
    )


def test_calls_to_another_model(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [], [], policy=None, policy_version=None, route="gpt-4.1")
    world.finish("r_a")
    world.ingest()
    assert world.why("r_a") == (
        "Not trained: all its calls went to models that are not being trained (gpt-4.1); [routes] says which "
        "names lead to policy.",
        "routes",
    )


def test_no_call_at_all(world: World) -> None:
    world.open("r_a")
    world.finish("r_a", "agent_error")
    world.ingest()
    assert world.why("r_a") == (
        "Not trained: its agent made no call and ended with `agent_error`.",
        None,
    )


def test_calls_that_all_failed(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [], [], status=502, error="engine gone", response=b"")
    world.finish("r_a", "agent_error")
    world.ingest()
    assert world.why("r_a")[0] == "Not trained: its 1 call sampled no token (1 error)."


def test_an_answer_that_was_cut(world: World) -> None:
    world.open("r_a")
    cut = response([1, 2], [3, 4]).replace(b'"finish_reason": "stop"', b'"finish_reason": "abort"')
    world.call("r_a", [1, 2], [3, 4], response=cut, status=499)
    world.finish("r_a", "timeout")
    world.ingest()
    assert world.why("r_a") == (
        "Not trained: none of its sampled tokens may be trained: 2 tokens of call 1 (partial) were not: the "
        "engine did not finish the response: the stream was cut or the generation aborted "
        "(train.timeout_s = 600).",
        "train.timeout_s",
    )


def test_a_rollout_that_was_sealed_for_being_idle(world: World) -> None:
    world.open("r_a", created_at=9.0)
    cut = response([1, 2], [3, 4]).replace(b'"finish_reason": "stop"', b'"finish_reason": null')
    world.call("r_a", [1, 2], [3, 4], response=cut, started_at=10.0, ended_at=11.0)
    world.finish("r_a", "timeout")
    world.ingest()
    assert world.why("r_a")[1] == "rewards.seal.idle_s"


def test_an_answer_that_the_agent_did_not_wait_for(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [1, 2], [3, 4], status=499)
    world.finish("r_a")
    world.ingest()
    assert world.why("r_a") == (
        "Not trained: none of its sampled tokens may be trained: 2 tokens of call 1 (undelivered) were not: "
        "the agent hung up before it got the response, and no later call builds on it.",
        None,
    )


def test_a_call_after_the_end(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [1, 2], [3, 4])
    world.finish("r_a")
    world.call("r_a", [1, 2, 3, 4, 5], [6])
    world.ingest()
    world.score("r_a", 1.0)
    world.played("r_b", 0.0)
    world.group()
    batch, _ = world.train()
    assert world.why("r_a") == (
        f"Trained: 2 of 3 sampled tokens in batch {batch} (step 1, which made v1), advantage +0.5; 1 token "
        "of call 2 (late) was not: the call was committed after its rollout was sealed "
        "(proxy.finish_wait_s = 2).",
        "proxy.finish_wait_s",
    )


def test_a_repeated_call(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [1, 2], [3, 4], body_hash=b"same")
    world.call("r_a", [1, 2], [5], body_hash=b"same", retry_count=1)
    world.finish("r_a")
    world.ingest()
    told = world.explain("r_a")
    assert told.tokens.untrainable == {"superseded": 2}
    assert told.tokens.pending == 1
    assert (
        told.reasons["superseded"] == "The client repeated the request and went on with the later response."
    )


# -- not yet ---------------------------------------------------------------------------------------


def test_open(world: World) -> None:
    world.open("r_a")
    ends = "it ends when its agent is finished or after 120 s without a call (rewards.seal.idle_s)"
    assert world.why("r_a") == (
        f"Not yet: it is still open, with no call so far; {ends}{CONTROL}.",
        "rewards.seal.idle_s",
    )
    world.store.acquire_lease("control", "control-1", 5.0)
    world.call("r_a", [1, 2], [3, 4])
    world.store.touch_in_flight("proxy-1", {"r_a": 1}, 5.0)
    assert world.why("r_a")[0] == (
        f"Not yet: it is still open, with 2 calls so far, 1 of them not answered yet; {ends}."
    )


def test_sealed_with_calls_that_nobody_has_read(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [1, 2], [3, 4])
    world.finish("r_a")
    assert world.why("r_a") == (
        f"Not yet: it is finished, but 1 of its 1 call is not read yet{CONTROL}.",
        None,
    )
    assert [call.id for call in world.explain("r_a").waiting] == ["c_r_a_1"]


def test_waiting_for_the_script(world: World) -> None:
    world.played("r_a")
    assert world.why("r_a") == (
        f"Not yet: it waits for its reward from the script{CONTROL}.",
        "rewards.script",
    )


def test_waiting_for_a_posted_score(tmp_path: Path) -> None:
    with world_of(tmp_path, rewards={"require": ["thumbs", "solved"], "wait_s": 60.0}) as world:
        world.played("r_a")
        world.store.post_score("r_a", "solved", 1.0, "application")
        assert world.why("r_a") == (
            f"Not yet: it waits for at most 60 s for the score 'thumbs' to be posted (rewards.require)"
            f"{CONTROL}.",
            "rewards.require",
        )


def test_waiting_for_its_group(world: World) -> None:
    world.played("r_a", 1.0, size=5)
    world.open("r_b", size=5)
    world.played("r_c", size=5)
    world.open("r_d", size=5)
    world.finish("r_d", "failed")
    assert world.why("r_a") == (
        "Not yet: its group g_1 waits for 4 more rollouts of 5 (1 running, 1 without a score, 1 to be "
        "repeated, 1 not started), at most until its deadline (rewards.group_deadline_s = 3600)"
        f"{CONTROL}.",
        "rewards.group_deadline_s",
    )


def test_waiting_past_the_deadline(tmp_path: Path) -> None:
    with world_of(tmp_path, rewards={"group_deadline_s": 0.001}) as world:
        world.played("r_a", 1.0)
        world.open("r_b")
        world.group()
        assert world.why("r_a")[0] == (
            "Not yet: its group g_1 waits for 1 more rollout of 2 (1 running), past its deadline "
            f"(rewards.group_deadline_s = 0.001) only until 2 are scored{CONTROL}."
        )
        world.open("r_c", "g_2")
        world.played("r_d", 0.0, group="g_2", size=3)
        world.played("r_e", 0.0, group="g_2", size=3)
        assert world.why("r_d")[0] == (
            "Not yet: its group g_2 is past its deadline (rewards.group_deadline_s = 0.001) and closes next, "
            f"on the 2 members that are scored{CONTROL}."
        )


def test_a_group_that_is_complete_or_of_no_size(world: World) -> None:
    world.played("r_a", 1.0)
    world.played("r_b", 0.0)
    world.played("r_c", 0.0, group="g_2", size=0)
    world.store.acquire_lease("control", "control-1", 5.0)
    assert world.why("r_a")[0] == "Not yet: its group g_1 has all its 2 members and closes next."
    assert world.why("r_c") == (
        "Not yet: its group g_2 has no declared size and closes 3600 s after it was opened "
        "(rewards.group_deadline_s).",
        "rewards.group_deadline_s",
    )


def test_waiting_for_the_batch(tmp_path: Path) -> None:
    with world_of(tmp_path, train={"groups_per_batch": 3}) as world:
        world.played("r_a", 1.0)
        world.played("r_b", 0.0)
        world.group()
        waits = "its group g_1 is closed and waits for the learner, which takes 3 at once "
        waits += "(train.groups_per_batch; 1 is ready), or fewer after 60 s (train.batch_wait_s)"
        assert world.why("r_a") == (f"Not yet: {waits}{LEARNER}.", "train.groups_per_batch")
        told = world.explain("r_a")
        assert told.advantage == 0.5  # what the learner will give it
        world.lead()
        assert world.why("r_a")[0] == f"Not yet: {waits}."


def test_in_a_batch(world: World) -> None:
    world.played("r_a", 1.0)
    world.played("r_b", 0.0)
    world.group()
    batch = world.take()
    assert world.why("r_a") == (f"Not yet: the learner has it in batch {batch}, for 0 s now.", None)
    world.store.release_lease(f"learner:{POLICY}", "learner-1")
    assert world.why("r_a")[0] == (
        f"Not yet: the learner has it in batch {batch}, for 0 s now; no learner runs now: `hone train` takes "
        "the batch up again."
    )


# -- dropped ---------------------------------------------------------------------------------------


def test_stale_with_its_group(tmp_path: Path) -> None:
    with world_of(tmp_path, train={"staleness_max": 0}) as world:
        world.played("r_old", 1.0, group="g_old")
        for id in ("r_a", "r_b"):
            world.played(id, float(id == "r_a"))
        world.group()
        world.train()
        world.activate(1)
        world.played("r_new", 0.0, group="g_old")
        world.group()
        assert world.take(staleness_max=0) is None
        assert world.why("r_old") == (
            "Not trained: its group g_old was dropped as stale: its tokens (v0) were 1 version behind v1, "
            "more than train.staleness_max = 0.",
            "train.staleness_max",
        )
        assert world.why("r_new")[0] == (
            "Not trained: its group g_old was dropped as stale: the tokens of its member r_old (v0) were "
            "1 version behind v1, more than train.staleness_max = 0."
        )


def test_its_version_had_to_make_room(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [1, 2], [3, 4])
    world.ingest()
    world.store.expire_pins(POLICY, 0)
    assert world.why("r_a") == (
        "Not trained: it took so long that its version v0 had to make room for newer ones on the engine "
        "before it was finished (stale; engine.versions_max = 8).",
        "engine.versions_max",
    )
    assert world.explain("r_a").kind == "pin_expired"


def test_our_side_failed(world: World) -> None:
    world.open("r_a")
    world.call("r_a", [], [], status=502, error="engine\n gone.", response=b"")
    world.finish("r_a", "failed")
    world.ingest()
    assert world.why("r_a") == (
        "Not trained: the infrastructure failed, not the agent (call 1: engine gone); it was attempt 1 of 3, "
        "not repeated yet (train.infrastructure_retries = 2).",
        "train.infrastructure_retries",
    )
    world.open("r_b", attempt=1, replaces="r_a")
    assert world.why("r_a")[0] == (
        "Not trained: the infrastructure failed, not the agent (call 1: engine gone); r_b repeats it."
    )
    world.open("r_c", attempt=2, replaces="r_b")
    world.finish("r_c", "failed")
    assert world.why("r_c")[0] == (
        "Not trained: the infrastructure failed, not the agent (its runner could not run it to its end: see "
        "logs/runner.log); it was attempt 3 of 3, the last one (train.infrastructure_retries = 2)."
    )


TRACEBACK = """Traceback (most recent call last):
  File "reward.py", line 3, in reward
    return trace["scenario"]["answer"]
KeyError: 'answer'
"""
ERRORS = {
    TRACEBACK: ("the reward script failed: KeyError: 'answer'", "rewards.script"),
    "the score 'win' is nan": ("the reward script failed: the score 'win' is nan", "rewards.script"),
    "no result after 10 s; it was here:\n  File x": (
        "the reward script gave no result after 10 s (rewards.timeout_s)",
        "rewards.timeout_s",
    ),
    "no score: rewards.script is not set and nobody posted one": (
        "no score: rewards.script is not set and nobody posted one",
        "rewards.script",
    ),
    "no score thumbs was posted within 60 s": ("no score thumbs was posted within 60 s", "rewards.require"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_no_reward(world: World, error: str) -> None:
    world.played("r_a")
    world.store.save_reward_error("r_a", error, "script")
    what, setting = ERRORS[error]
    assert world.why("r_a") == (f"Not trained: {what}.", setting)
    assert world.explain("r_a").reward_error == error
    assert world.explain("r_a").tokens.dropped == 5


def test_a_group_with_too_few_rewards(world: World) -> None:
    world.played("r_a", 1.0, size=3)
    for id in ("r_b", "r_c"):
        world.played(id, size=3)
        world.store.save_reward_error(id, TRACEBACK, "script")
    world.group()
    assert world.why("r_a") == (
        "Not trained: only 1 of the 3 members of its group has a reward (2 reward_error), and it takes 2 to "
        "compare.",
        "train.group_size",
    )


def test_a_group_that_drops_what_its_agents_broke(tmp_path: Path) -> None:
    with world_of(tmp_path, rewards={"on_agent_failure": "drop"}) as world:
        for id in ("r_a", "r_b"):
            world.played(id, float(id == "r_a"), size=3)
        world.open("r_c", size=3)
        world.call("r_c", [1, 2], [3, 4])
        world.finish("r_c", "timeout")
        world.ingest()
        world.score("r_c", 0.0)
        world.group()
        assert world.why("r_c") == (
            "Not trained: its agent ended with `timeout`, and rewards.on_agent_failure is `drop`.",
            "rewards.on_agent_failure",
        )


def test_a_group_that_closed_at_its_deadline(tmp_path: Path) -> None:
    with world_of(tmp_path, rewards={"group_deadline_s": 0.001}) as world:
        for id in ("r_a", "r_b"):
            world.played(id, float(id == "r_a"), size=3)
        world.open("r_c", size=3)
        world.group()
        assert world.why("r_c") == (
            "Not trained: its group closed at its deadline (rewards.group_deadline_s = 0.001) before this "
            "rollout had a reward.",
            "rewards.group_deadline_s",
        )


def test_a_place_that_another_attempt_took(world: World) -> None:
    world.played("r_a", 1.0)
    world.played("r_b", 1.0)
    world.played("r_c", 0.0, attempt=1, replaces="r_b")
    world.group()
    assert world.why("r_b") == ("Not trained: r_c took its place in the group.", None)


def test_without_a_group(world: World) -> None:
    world.played("r_a", 1.0, group=None)
    assert world.why("r_a") == (
        "Not trained: it belongs to no group, so there is nothing to compare its reward with; give "
        "`group_id` and `group_size` when opening it.",
        None,
    )


def test_without_a_run(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "hone.db")
    store.open_rollout(rollout(id="r_a", group_id="g_1", policy=POLICY), group_size=2)
    assert explain(look(store, "r_a", sections())[0]).sentence == (
        "Not trained: no run was on when it was opened, so no learner takes its group g_1; open rollouts for "
        "training while `hone train` runs."
    )
    store.close()


def test_a_batch_that_was_not_finite(world: World) -> None:
    world.played("r_a", 1.0)
    world.played("r_b", 0.0)
    world.group()
    batch = world.take()
    assert batch is not None
    world.store.drop_batch(batch, "nonfinite", world.lead())
    assert world.why("r_a") == (
        f"Not trained: batch {batch} gave a gradient that is not finite, twice, and was dropped; a lower "
        "learning rate helps (train.lr = 2e-05).",
        "train.lr",
    )


def test_the_end_of_the_run(tmp_path: Path) -> None:
    with world_of(tmp_path, train={"steps_max": 1}) as world:
        for id in ("r_a", "r_b"):
            world.played(id, float(id == "r_a"))
        world.group()
        world.train()
        world.played("r_c", 1.0, group="g_2")
        world.store.end_run(RUN, "run_ended")
        assert world.why("r_c") == (
            "Not trained: run run1 ended at step 1 (train.steps_max = 1) before a batch with it was "
            "committed.",
            "train.steps_max",
        )


# -- not for training ------------------------------------------------------------------------------


def test_an_evaluation(world: World) -> None:
    world.played("r_a", group=None, mode="eval")
    assert world.why("r_a")[0] == ("Not for training: it is an evaluation of version v0, and it is ingested.")
    world.score("r_a", 0.75)
    assert world.why("r_a") == (
        "Not for training: it is an evaluation of version v0, and its reward is 0.75.",
        None,
    )
    assert world.explain("r_a").tokens.not_for_training == 5


@pytest.mark.parametrize("headless", [False, True])
def test_observed(world: World, headless: bool) -> None:
    world.store.open_rollout(rollout(id="r_a", mode="observe", headless=headless))
    world.call("r_a", [1, 2], [3, 4], policy_version=0)
    world.ingest()
    how = "nobody said whose call it was (headless)" if headless else "nobody opened it for training"
    hint = "`passive.train = true` trains on rollouts like it while a run is on; or"
    assert world.why("r_a") == (
        f"Not for training: {how}, so it was only observed; {'to train on it,' if headless else hint} open a "
        "rollout with `POST /rollouts` in mode `train` and give its agent that base_url.",
        None if headless else "passive.train",
    )


# -- which rollout is meant ------------------------------------------------------------------------


def test_ids_of_calls_and_beginnings_of_ids(world: World) -> None:
    world.played("r_abc1")
    world.played("r_abd2")
    assert world.explain("r_abc").rollout_id == "r_abc1"
    assert world.explain("c_r_abd2_2").rollout_id == "r_abd2"
    with pytest.raises(NotFound, match=r"^no rollout or call 'r_x'$"):
        world.explain("r_x")
    with pytest.raises(Conflict, match=r"^r_ab could be r_abc1, r_abd2: give more of the id$"):
        world.explain("r_ab")


# -- words -----------------------------------------------------------------------------------------


def test_every_setting_that_is_named_exists() -> None:
    known = sections()
    extra = {"rewards.seal.idle_s", "rewards.require", "rewards.timeout_s", "train.groups_per_batch"}
    extra |= {"engine.versions_max", "train.timeout_s", "train.wall_s", "train.batch_wait_s"}
    for name in {*SETTINGS.values(), *extra}:
        value: Any = known
        for key in name.split("."):
            assert key in value, name
            value = value[key]


def test_the_one_fork_that_is_no_trouble_is_a_fork() -> None:
    assert ROOT in FORKS


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "it said nothing"),
        ("\n one thing.\nand more", "one thing"),
        (TRACEBACK, "KeyError: 'answer'"),
        (f"{TRACEBACK}\nDuring handling, another exception occurred:\n\n{TRACEBACK}", "KeyError: 'answer'"),
        ("x" * 300, "x" * 199 + "…"),
    ],
)
def test_the_line_of_an_error(text: str, line: str) -> None:
    assert error_line(text) == line
