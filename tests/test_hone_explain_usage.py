"""How much is usable and why the rest is not: a store with a bit of everything, counted by hand."""

import json
from collections import Counter
from pathlib import Path

import pytest
from capture_makers import POLICY, request, rollout
from explain_world import RUN, World

from capture.sqlite import SqliteStore
from capture.store import FateCounts
from capture.types import Balance
from hone.cli.main import main
from hone.explain.usage import lines, percent, usage
from hone.status import look as look_at_all
from hone.status import render

NOTHING = Balance(0, 0, 0, {}, {}, {}, 0)

TABLE = """\
  10   27 %  trained         2 rollouts
   7   19 %  pending         2 rollouts
  10   27 %  zero_advantage  2 rollouts: The rewards of their group were all equal, or theirs was its mean \
(train.group_size)
   5   14 %  reward_error    1 rollout: The reward script broke; its traceback is kept with the rollout \
(rewards.script)
   3    8 %  grammar         1 call: A grammar (forced tool choice, response format, structured output) \
masked the sampling (sampling.grammar)
   2    5 %  superseded      1 call: The client repeated the request and went on with the later response
   0    0 %  provider        2 calls: The call went to a model that is not being trained (routes)
   0    0 %  failed          1 rollout: The infrastructure failed, not the agent; the runner may repeat the \
rollout (train.infrastructure_retries)
   5         eval            1 rollout: The rollout was an evaluation
   2         observe         1 rollout: The rollout was only observed"""
SENTENCE = (
    "Usable: 46 % of the 37 tokens that policy sampled for training (10 trained, 7 pending); the largest "
    "loss is zero_advantage, 10 tokens: the rewards of their group were all equal, or theirs was its mean "
    "(train.group_size)."
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """37 tokens for training: 10 + 10 in batches, 5 + 2 pending, 5 dropped, 3 + 2 lost; 5 + 2 elsewhere."""
    world = World(SqliteStore(tmp_path / "hone.db"))
    for group, rewards in (("g_1", (1.0, 0.0)), ("g_2", (0.5, 0.5))):
        for number, reward in enumerate(rewards):
            world.played(f"r_{group}_{number}", reward, group=group)
        world.group()
        world.train()
    world.played("r_waits", 1.0, group="g_3", size=4)
    world.played("r_error", group="g_3", size=4)
    world.store.save_reward_error("r_error", "no", "script")
    world.open("r_failed", "g_3", size=4)
    world.finish("r_failed", "failed")
    world.open("r_mixed", "g_3", size=4)
    world.call("r_mixed", [1, 2], [3, 4, 5], request=request(tool_choice="required"))
    world.call("r_mixed", [1, 7], [3, 4], body_hash=b"again")
    world.call("r_mixed", [1, 7], [5, 6], body_hash=b"again", retry_count=1)
    for _ in range(2):
        world.call("r_mixed", [], [], policy=None, policy_version=None, route="gpt-5")
    world.finish("r_mixed")
    world.played("r_eval", 1.0, group=None, mode="eval")
    world.store.open_rollout(rollout(id="r_seen", mode="observe"))
    world.call("r_seen", [1, 2], [3, 4], policy_version=0)
    world.ingest()
    return world


def test_the_sentence_and_a_line_for_each_fate(world: World) -> None:
    found = usage(POLICY, world.store.balance(POLICY), world.store.fate_counts(POLICY))
    assert found is not None
    assert found.sentence == SENTENCE
    assert (found.sampled, found.for_training, found.usable) == (44, 37, 17 / 37)
    assert sum(one.tokens for one in found.shares) == found.sampled
    assert sum(one.share for one in found.shares if one.share is not None) == pytest.approx(1.0)
    assert "\n".join(lines(found)) == TABLE


def test_status_shows_it(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = look_at_all(world.store, POLICY, [])
    assert render(status).endswith(f"\n\n{SENTENCE}\n{TABLE}")
    assert look_at_all(world.store, POLICY, [], sums=False).usage is None
    config = tmp_path / "hone.toml"
    config.write_text(f'[policy]\nbase_model = "org/model"\n[capture]\npath = "{tmp_path}/hone.db"\n')
    assert main(["status", "--json", "-c", str(config)]) == 0
    shown = json.loads(capsys.readouterr().out)["usage"]
    assert shown["sentence"] == SENTENCE
    assert shown["shares"][2] == {
        "fate": "zero_advantage",
        "tokens": 10,
        "share": 10 / 37,
        "met_by": 2,
        "of": "rollout",
        "why": "The rewards of their group were all equal, or theirs was its mean.",
        "setting": "train.group_size",
    }


def test_the_rollouts_one_by_one_say_what_the_balance_says(world: World) -> None:
    balance = world.store.balance(POLICY)
    told = [world.explain(one.id).tokens for one in world.store.rollouts()]
    lost = sum((Counter(one.untrainable) for one in told), Counter())
    assert sum(one.sampled for one in told) == balance.sampled == 44
    assert sum(one.trained for one in told) == balance.trained == 10
    assert sum(one.zero_advantage for one in told) == balance.zero_advantage == 10
    assert sum(one.pending for one in told) == balance.pending == 7
    assert sum(one.dropped for one in told) == sum(balance.dropped.values()) == 5
    assert lost == {"grammar": 3, "superseded": 2}
    assert sum(one.not_for_training for one in told) == 7


def test_at_the_end_of_the_run_what_was_pending_is_lost(world: World) -> None:
    world.store.end_run(RUN, "run_ended")
    found = usage(POLICY, world.store.balance(POLICY), world.store.fate_counts(POLICY))
    assert found is not None
    ended = next(one for one in found.shares if one.fate == "run_ended")
    assert (ended.tokens, ended.met_by, ended.setting) == (7, 2, "train.steps_max")
    assert found.usable == 10 / 37


def test_nothing_sampled_nothing_said() -> None:
    assert usage("p", NOTHING, FateCounts({}, {})) is None


def test_a_store_without_a_token_for_training_says_what_its_calls_met() -> None:
    found = usage("p", NOTHING, FateCounts({"pending": 1}, {"provider": 12, "error": 3}))
    assert found is not None
    assert found.sentence == (
        "Usable: nothing yet, p sampled no token for training; the most common fate is provider, 12 calls: "
        "the call went to a model that is not being trained (routes)."
    )
    seen = Balance(9, 0, 0, {}, {}, {"observe": 9}, 0)
    found = usage("p", seen, FateCounts({"observe": 4}, {}))
    assert found is not None
    assert found.sentence == (
        "Usable: nothing yet, p sampled no token for training; the most common fate is observe, 9 tokens: "
        "the rollout was only observed."
    )
    assert [one.share for one in found.shares] == [None]


def test_everything_usable() -> None:
    found = usage("p", Balance(1, 1, 0, {}, {}, {}, 0), FateCounts({"trained": 1}, {}))
    assert found is not None
    assert found.sentence == (
        "Usable: 100 % of the 1 token that p sampled for training (1 trained, 0 pending)."
    )


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0 %"), (0.004, "<1 %"), (0.5, "50 %"), (0.996, ">99 %"), (1.0, "100 %")]
)
def test_no_share_looks_like_none_or_all_unless_it_is(share: float, text: str) -> None:
    assert percent(share) == text
