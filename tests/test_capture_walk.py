"""A random walk over the store's operations: whatever happens, the sums are right after each step."""

import tempfile
from pathlib import Path

from capture_makers import POLICY, base_of, model_call, raw_call, rollout
from hypothesis import HealthCheck, event, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from capture.errors import Conflict
from capture.frames import pack
from capture.graph import build, fates, samples
from capture.sqlite import SqliteStore
from capture.store import Rescored
from capture.types import Commit, GroupFilter, LedgerRow

RUN = "run1"
MODES = st.sampled_from(["train", "train", "train", "eval", "observe"])
TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
STATUSES = st.sampled_from(["completed", "completed", "timeout", "failed"])
UNTRAINABLE = st.sampled_from([None, None, None, "grammar", "no_token_ids", "error"])


class Walk(RuleBasedStateMachine):
    """Operations in any order, as several processes and crashes would give them."""

    rollouts = Bundle("rollouts")
    records = Bundle("records")

    def __init__(self):
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.store = SqliteStore(Path(self.directory.name) / "store.sqlite")
        self.store._db.execute("PRAGMA synchronous = OFF")  # nothing here is about losing power
        self.store.start_run(RUN, POLICY, {})
        self.epoch = self.store.acquire_lease(f"learner:{POLICY}", "learner", 3600.0)
        self.groups = 0
        self.ended = False

    def teardown(self):
        self.store.close()
        self.directory.cleanup()

    @rule(target=rollouts, mode=MODES, grouped=st.booleans(), fresh=st.booleans())
    def open(self, mode, grouped, fresh):
        self.groups += fresh
        group = f"g_{self.groups}" if grouped and mode == "train" else None
        opened = rollout(mode=mode, group_id=group, run_id=RUN if group else None)
        try:
            return self.store.open_rollout(opened, group_size=2).id
        except Conflict:
            return self.store.open_rollout(rollout(mode=mode)).id

    @rule(
        target=records,
        id=rollouts,
        status=st.sampled_from([200, 200, 200, 499, 500]),
        policy=st.sampled_from([POLICY, POLICY, POLICY, None, "other"]),
        body=st.sampled_from([b"a", b"b"]),
        retry=st.integers(0, 1),
    )
    def call(self, id, **fields):
        fields = {
            "status": fields["status"],
            "policy": fields["policy"],
            "body_hash": fields["body"],
            "retry_count": fields["retry"],
        }
        record = raw_call(id, **fields)
        self.store.commit_calls(pack([record]), [record], [])
        return record

    @rule(record=records)
    def commit_again(self, record):
        self.store.commit_calls(pack([record]), [record], [])

    @rule(record=records)
    def hang_up(self, record):
        self.store.mark_undelivered([record.id])

    @rule(data=st.data(), sampled=TOKENS, untrainable=UNTRAINABLE)
    def ingest_one(self, data, sampled, untrainable):
        pending = self.store.pending_calls(8)
        if not pending:
            return
        raw = data.draw(st.sampled_from(pending)).raw
        known = [call for call in self.store.calls(raw.rollout_id) if call.sampled_ids]
        base = data.draw(st.sampled_from([None, *known]))
        prompt = [1] if base is None else base.prompt_ids + base.sampled_ids + data.draw(TOKENS)
        if untrainable == "no_token_ids":
            fields = {"prompt_ids": [], "sampled_ids": [], "completion_tokens": len(sampled)}
        else:
            fields = {"prompt_ids": prompt, "sampled_ids": sampled}
        call = model_call(
            id=raw.id,
            rollout_id=raw.rollout_id,
            untrainable="provider" if raw.policy is None else untrainable,
            **{"policy": raw.policy, "retry_count": raw.retry_count, "body_hash": raw.body_hash, **fields},
        )
        bases = {}
        if base is not None and fields["prompt_ids"]:
            bases[call.id] = base_of(base, len(base.prompt_ids) + len(base.sampled_ids), 0)
        self.store.save_calls([call], bases)
        self.store.save_calls([call], bases)

    @rule(id=rollouts, status=STATUSES)
    def seal(self, id, status):
        try:
            self.store.seal_rollout(id, status)
        except Conflict:
            assert self.store.rollout(id).status != status

    @rule(passive=st.booleans(), scenario=st.sampled_from(["fp-1", "fp-2", None]))
    def settle(self, passive, scenario):
        """Turned on and off between rollouts, the setting changes nothing for those that were settled."""
        for ready in self.store.settleable():
            graph = build(self.store.calls(ready.id))
            decided = {one.id: one.passive for one in self.store.rollouts()}
            self.store.settle(ready.id, fates(graph), scenario_id=scenario, passive=passive)
            self.store.settle(ready.id, fates(graph), scenario_id="fp-3", passive=not passive)
            after = self.store.rollout(ready.id)
            wanted = passive and ready.mode == "observe" and not self.ended
            assert after.passive <= wanted
            assert after.scenario_id == scenario
            assert {one.id: one.passive for one in self.store.rollouts()} == decided | {
                after.id: after.passive
            }
            if after.passive:
                event("took an observed rollout into training")
            again = build(self.store.calls(ready.id))
            assert samples(again) == samples(graph)

    @rule(good=st.integers(0, 3), reward=st.floats(-1, 1))
    def score(self, good, reward):
        for ready in self.store.scoreable(3):
            if good:
                self.store.save_score(ready.id, reward, {"reward": reward}, "script", group_size=2)
            else:
                self.store.save_reward_error(ready.id, "boom", "script")

    @rule(data=st.data(), reward=st.floats(-1, 1), script=st.sampled_from(["script", "script 2"]))
    def rescore(self, data, reward, script):
        every = [one.id for one in self.store.rollouts()]
        if every:
            ids = st.lists(st.sampled_from(every), min_size=1, max_size=4, unique=True)
            self.rescore_these(data.draw(ids), reward, script)

    def rescore_these(self, ids, reward, script):
        """All of them have the new score afterwards, or everything is as it was."""
        every = {one.id: one for one in self.store.rollouts()}
        scores = {"reward": reward}
        new = [
            Rescored(
                rollout_id=id,
                reward=reward,
                scores=scores,
                script_hash=script,
                posted=self.store.posted_scores(id),
            )
            for id in ids
        ]
        try:
            self.store.rescore(new, group_size=2)
        except Conflict:
            assert {one.id: one for one in self.store.rollouts()} == every
            return
        for id in ids:
            before, after = every[id], self.store.rollout(id)
            assert (after.reward, after.scores, after.script_hash) == (reward, scores, script)
            assert before.batch_id is None
            assert before.state in ("scored", "grouped", "reward_error", "dropped")
            event("rescored " + before.state + " to " + after.state)

    @rule(id=rollouts, value=st.floats(-1, 1))
    def post(self, id, value):
        try:
            self.store.post_score(id, "thumbs", value, "user")
        except Conflict:
            assert self.store.rollout(id).state in ("taken", "trained")

    @rule()
    def close_groups(self):
        for group in [*self.store.open_groups(), *self.store.gathered_groups(-1.0)]:
            members = self.store.rollouts(group_id=group.id, states=["scored"])
            self.store.close_group(group.id, [one.id for one in members], {})

    @rule(target=rollouts, size=st.integers(2, 3), data=st.data())
    def play_a_group(self, size, data):
        """The straight way of a group, so that random steps also meet the later states."""
        self.groups += 1
        ids = []
        for _ in range(size):
            try:
                opened = self.store.open_rollout(rollout(run_id=RUN, group_id=f"g_{self.groups}"))
            except Conflict:
                assert self.ended
                return multiple(*ids)
            ids.append(opened.id)
            self.call(opened.id, status=200, policy=POLICY, body=b"a", retry=0)
        while self.store.pending_calls(1):
            self.ingest_one(data, [5], None)
        for id in ids:
            self.seal(id, "completed")
        while self.store.settleable():
            self.settle(False, None)
        while self.store.scoreable(1):
            self.score(data.draw(st.integers(0, 3)), 0.5)
        if data.draw(st.booleans()):
            self.rescore_these(ids, 0.25, "script 2")
        if data.draw(st.booleans()):
            self.close_groups()
        if data.draw(st.booleans()):
            self.rescore_these(ids, 0.5, "script 2")
        if data.draw(st.booleans()):
            self.learn(data.draw(st.booleans()))
        event("played a group")
        return multiple(*ids)

    @rule(target=rollouts, size=st.integers(2, 3), headless=st.booleans(), data=st.data())
    def observe_a_scenario(self, size, headless, data):
        """The straight way of rollouts that nobody opened for training, under two keys."""
        ids = []
        for key_id in data.draw(st.lists(st.sampled_from(["k", "other"]), min_size=size, max_size=size)):
            fresh = rollout(mode="observe", key_id=key_id, headless=headless)
            ids.append(self.store.open_rollout(fresh).id)
            self.call(ids[-1], status=200, policy=POLICY, body=b"a", retry=0)
        while self.store.pending_calls(1):
            self.ingest_one(data, [5], None)
        for id in ids:
            self.seal(id, "completed")
        while self.store.settleable():
            self.settle(True, "fp-1")
        while self.store.scoreable(1):
            self.score(1, 0.5)
        if data.draw(st.booleans()):
            self.close_groups()
        if data.draw(st.booleans()):
            self.learn(data.draw(st.booleans()))
        event("observed a scenario")
        return multiple(*ids)

    @rule(staleness=st.integers(0, 2), groups=st.integers(1, 3), equal=st.booleans())
    def take(self, staleness, groups, equal):
        unless = GroupFilter(zero_variance=equal)
        wanted = {"groups": groups, "batch_wait_s": 0.0, "staleness_max": staleness, "unless": unless}
        batch = self.store.take_batch(RUN, epoch=self.epoch, **wanted)
        if batch is not None:
            assert self.store.take_batch(RUN, epoch=self.epoch, **wanted) == batch

    @rule(zero=st.booleans(), left_out=st.integers(0, 2))
    def learn(self, zero, left_out=0):
        batch = self.store.take_batch(RUN, epoch=self.epoch, groups=2, batch_wait_s=0.0, staleness_max=2)
        if batch is None:
            return
        rows = []
        for one in (one for group in batch.groups for one in group):
            found = samples(build(self.store.calls(one.id)))
            owned = sum(sum(sample.loss_mask) for sample in found)
            rows.append(LedgerRow(one.id, 0 if zero else owned, owned if zero else 0, 0.0))
        commit = Commit(
            batch_id=batch.id,
            run_id=RUN,
            lineage=f"l_{RUN}",
            epoch=self.epoch,
            step=self.store.lineage(RUN).step + 1,
            checkpoint="c",
            rows=rows[left_out:],
            metrics={},
            new_version=not zero,
            dropped={row.rollout_id: "overlong" for row in rows[:left_out]},
        )
        assert self.store.commit_batch(commit) == self.store.commit_batch(commit)
        event("committed a batch")

    @rule()
    def drop_batch(self):
        batch = self.store.take_batch(RUN, epoch=self.epoch, groups=2, batch_wait_s=0.0, staleness_max=2)
        if batch is not None:
            self.store.drop_batch(batch.id, "nonfinite", self.epoch)
            event("dropped a batch")

    @rule()
    def expire(self):
        self.store.expire_pins(POLICY, 0)

    @rule()
    def prune(self):
        self.store.prune_frames(-1.0)

    @rule(sure=st.integers(0, 19))
    def end(self, sure):
        if sure == 0:
            self.store.end_run(RUN, "run_ended")
            self.ended = True

    @rule()
    def restart(self):
        path = self.store.path
        self.store.close()
        self.store = SqliteStore(path)
        self.store._db.execute("PRAGMA synchronous = OFF")

    @invariant()
    def everything_adds_up(self):
        assert self.store.verify() == []
        assert self.store.balance(POLICY).exact
        if self.ended and not self.store.rollouts(states=["open", "sealed", "ingested"], mode="train"):
            assert self.store.balance(POLICY).pending == 0


Walk.TestCase.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_walk = Walk.TestCase
