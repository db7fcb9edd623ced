"""A store in which rollouts go the whole way, by the code that moves them in a run: journal frames are
ingested, graphs settled, groups closed and batches committed. Only the numbers are made up."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from capture_makers import POLICY, raw_call, request, response, rollout

from capture.frames import pack
from capture.graph import build, fates
from capture.ingest import Ingester
from capture.sqlite import SqliteStore
from capture.types import Commit, EngineVersion, FinishStatus, LedgerRow, RawCall, Version
from hone.config import resolve
from hone.explain.explanation import Explanation, explain
from hone.explain.look import look
from learner.advantage import advantages
from rewards.groups import Grouper
from rewards.settings import PassiveSettings, Settings
from rewards.settle import Settler, Traces

RUN = "run1"


def sections(**changed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every setting of a `hone.toml` that says only this."""
    small = {"group_size": 2, "groups_per_batch": 1}
    raw = {
        "policy": {"base_model": "org/model"},
        **changed,
        "train": {**small, **changed.get("train", {})},
    }
    return resolve(raw, {}, Path("/work/hone.toml"), "cpu").sections()


class World:
    """A run of one policy. Rollouts are named by the tests; a call is `(prompt ids, sampled ids)`."""

    def __init__(self, store: SqliteStore, **settings: Any) -> None:
        self.store = store
        self.settings = sections(**settings)
        store.start_run(RUN, POLICY, self.settings)
        passive = PassiveSettings(
            **settings.get("passive", {}), group_size=self.settings["train"]["group_size"]
        )
        self.rewards = Settings(**settings.get("rewards", {}), passive=passive)
        self._ingester = Ingester(store)
        self._step = 0

    # -- agents ------------------------------------------------------------------------------

    def open(self, id: str, group: str | None = "g_1", *, size: int = 2, **fields: Any) -> str:
        """A train rollout of the run on the active version, in a group of two unless that is said."""
        active = self.store.active_version(POLICY)
        fields = {"policy_version": None if active is None else active.version, **fields}
        opened = rollout(id=id, run_id=RUN, group_id=group, **fields)
        return self.store.open_rollout(opened, group_size=size).id

    def observe(self, id: str, *, key_id: str = "k", **fields: Any) -> str:
        """A rollout of a session, which nobody opened for training."""
        return self.store.open_rollout(rollout(id=id, mode="observe", key_id=key_id, **fields)).id

    def call(self, rollout_id: str, prompt: list[int], sampled: list[int], **fields: Any) -> RawCall:
        """Commit one call; its id is `c_` and a number, so calls have the order in which they were made."""
        number, now = self.store.rollout(rollout_id).call_count + 1, self.store.now()
        raw = raw_call(
            rollout_id,
            **{
                "id": f"c_{rollout_id}_{number}",
                "mode": self.store.rollout(rollout_id).mode,
                "key_id": self.store.rollout(rollout_id).key_id,
                "policy_version": self.store.rollout(rollout_id).policy_version or 0,
                "started_at": now,
                "ended_at": now,
                "response": response(prompt, sampled),
                "body_hash": f"{rollout_id}_{number}".encode(),
                **fields,
            },
        )
        self.store.commit_calls(pack([raw]), [raw], [])
        return raw

    def finish(self, rollout_id: str, status: FinishStatus = "completed") -> str:
        """Its agent is through."""
        return self.store.seal_rollout(rollout_id, status).id

    # -- control -----------------------------------------------------------------------------

    def ingest(self) -> None:
        """Read every committed call and settle what is sealed."""
        while self._ingester.step():
            pass
        Settler(self.store, Traces(self.store), keep=False, passive=self.rewards.passive.train).step()

    def score(self, rollout_id: str, reward: float) -> None:
        """What the reward script would have said."""
        size = self.rewards.passive.group_size
        self.store.save_score(rollout_id, reward, {"reward": reward}, "script", group_size=size)

    def group(self) -> None:
        """Close every group that is due."""
        Grouper(self.store, self.rewards).step()

    def played(
        self, id: str, reward: float | None = None, group: str | None = "g_1", size: int = 2, **fields: Any
    ) -> str:
        """A finished rollout of two calls that sampled 2 + 3 tokens, scored if there is a reward."""
        self.open(id, group, size=size, **fields)
        self.call(id, [1, 2], [3, 4])
        self.call(id, [1, 2, 3, 4, 5], [6, 7, 8])
        self.finish(id)
        self.ingest()
        if reward is not None:
            self.score(id, reward)
        return id

    def watched(self, id: str, reward: float | None = None, *, says: str = "go", **fields: Any) -> str:
        """An observed rollout of two calls that sampled 2 + 3 tokens, at its end."""
        asked = request([{"role": "user", "content": says}])
        self.observe(id, **fields)
        self.call(id, [1, 2], [3, 4], request=asked)
        self.call(id, [1, 2, 3, 4, 5], [6, 7, 8], request=asked)
        self.finish(id)
        self.ingest()
        if reward is not None:
            self.score(id, reward)
        return id

    # -- the learner -------------------------------------------------------------------------

    def lead(self) -> int:
        """The learner's lease."""
        epoch = self.store.acquire_lease(f"learner:{POLICY}", "learner-1", 5.0)
        assert epoch is not None
        return epoch

    def take(self, *, staleness_max: int = 4) -> str | None:
        """Take what is closed; the batch's id."""
        batch = self.store.take_batch(
            RUN, epoch=self.lead(), groups=1, batch_wait_s=0.0, staleness_max=staleness_max
        )
        return None if batch is None else batch.id

    def train(self) -> tuple[str, Version | None]:
        """Take a batch and commit it with the advantages that its rewards give."""
        epoch = self.lead()
        batch = self.store.take_batch(RUN, epoch=epoch, groups=1, batch_wait_s=0.0, staleness_max=4)
        assert batch is not None
        rows = []
        for group in batch.groups:
            given = advantages([one.reward for one in group if one.reward is not None])
            for one, advantage in zip(group, given, strict=True):
                graph = build(self.store.calls(one.id))
                own = [graph.nodes[fate.call_id].call for fate in fates(graph) if fate.excluded is None]
                tokens = sum(len(call.sampled_ids) for call in own)
                trained = tokens if advantage else 0
                rows.append(LedgerRow(one.id, trained, tokens - trained, advantage))
        new = any(row.advantage for row in rows)
        self._step += new
        version = self.store.commit_batch(
            Commit(
                batch_id=batch.id,
                run_id=RUN,
                lineage=f"l_{RUN}",
                epoch=epoch,
                step=self._step,
                checkpoint=f"checkpoint-{self._step}",
                rows=rows,
                metrics={},
                new_version=new,
            )
        )
        return batch.id, version

    def activate(self, version: int) -> None:
        """Rollouts that are opened from now on are pinned to it."""
        self.store.publish_version(POLICY, version, f"/adapters/v{version}", "00", self.lead())
        row = EngineVersion(engine="engine-1", policy=POLICY, version=version, state="verified")
        self.store.record_engine_version(row)
        epoch = self.store.acquire_lease("activator", "proxy-1", 5.0)
        assert epoch is not None
        self.store.activate(POLICY, version, epoch)

    # -- and the answer ----------------------------------------------------------------------

    def explain(self, id: str) -> Explanation:
        """The answer to "why did this rollout not train?"."""
        return explain(look(self.store, id, self.settings)[0])

    def why(self, id: str) -> tuple[str, str | None]:
        """Its sentence and the setting that it names."""
        explanation = self.explain(id)
        return explanation.sentence, explanation.setting


@contextmanager
def passive_world(folder: Path, **settings: Any) -> Iterator[World]:
    """A run with `passive.train` in groups of two; at the end its store holds everything that it must."""
    store = SqliteStore(folder / "hone.db")
    yield World(store, **{"passive": {"train": True}, **settings})
    assert store.verify() == []
    store.close()
