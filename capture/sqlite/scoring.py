"""From sealed to grouped: settling, scores, closing groups."""

import math
from collections.abc import Mapping, Sequence

from capture.errors import Conflict, NotFound, RewardFrozen
from capture.sqlite.passive import GROUP_COLUMNS, Passive, group_from
from capture.sqlite.rollouts import COLUMNS, rollout_from, to_json
from capture.types import CallFate, Group, Rollout


class Scoring(Passive):
    """The methods of `capture.store.Store` for scores and groups."""

    # -- scoring -----------------------------------------------------------------------------

    def settle(
        self,
        rollout_id: str,
        fates: Sequence[CallFate],
        *,
        scenario_id: str | None = None,
        passive: bool = False,
        aside: str | None = None,
    ) -> None:
        with self._write():
            rollout = self.rollout(rollout_id)
            if rollout.state == "open":
                raise Conflict(f"rollout {rollout_id} is still open")
            if rollout.state != "sealed":
                return
            self._db.executemany(
                "UPDATE calls SET excluded = ? WHERE id = ? AND rollout_id = ? AND late = 0",
                [(fate.excluded, fate.call_id, rollout_id) for fate in fates],
            )
            self._db.execute(
                "UPDATE rollouts SET state = 'ingested', scenario_id = coalesce(scenario_id, ?) WHERE id = ?",
                (scenario_id, rollout_id),
            )
            if aside is not None and rollout.mode == "observe":
                self._db.execute(
                    "UPDATE rollouts SET state = 'dropped', drop_reason = ? WHERE id = ?", (aside, rollout_id)
                )
            elif passive:
                self._admit(rollout)

    def scoreable(self, limit: int = 100) -> list[Rollout]:
        rows = self._rows(f"SELECT {COLUMNS} FROM rollouts WHERE rescore = 1 LIMIT ?", (limit,))
        again = [rollout_from(row) for row in rows]
        return [*again, *self._in_state("ingested", limit - len(again))]

    def save_score(
        self,
        rollout_id: str,
        reward: float,
        scores: Mapping[str, float],
        script_hash: str,
        *,
        group_size: int = 0,
    ) -> None:
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} of {rollout_id} is not a finite number")
        with self._write():
            if (rollout := self._scoring(rollout_id)) is None:
                return
            self._db.execute(
                "UPDATE rollouts SET state = ?, reward = ?, scores = ?, script_hash = ?, "
                "reward_error = NULL, rescore = 0 WHERE id = ?",
                (
                    "scored" if rollout.state == "ingested" else rollout.state,
                    reward,
                    to_json(scores),
                    script_hash,
                    rollout_id,
                ),
            )
            if rollout.group_id is None and not self._gather(rollout, group_size):
                self._drop([rollout_id], "ungrouped")

    def save_reward_error(self, rollout_id: str, error: str, script_hash: str) -> None:
        with self._write():
            if (rollout := self._scoring(rollout_id)) is None:
                return
            self._db.execute(
                "UPDATE rollouts SET reward_error = ?, script_hash = ?, rescore = 0 WHERE id = ?",
                (error, script_hash, rollout_id),
            )
            if rollout.state == "ingested":
                self._db.execute("UPDATE rollouts SET state = 'reward_error' WHERE id = ?", (rollout_id,))
                self._drop([rollout_id], "reward_error", state="reward_error")

    def _scoring(self, rollout_id: str) -> Rollout | None:
        """The rollout, None if it left the pipeline meanwhile, `Conflict` if it awaits no score."""
        rollout = self.rollout(rollout_id)
        if rollout.state in ("dropped", "failed"):
            return None
        if rollout.state == "ingested":
            return rollout
        if self._value("SELECT rescore FROM rollouts WHERE id = ?", (rollout_id,)):
            return rollout
        raise Conflict(f"rollout {rollout_id} is {rollout.state}: it awaits no score")

    def post_score(self, rollout_id: str, name: str, value: float, source: str) -> None:
        if not math.isfinite(value):
            raise ValueError(f"score {name} = {value} is not a finite number")
        with self._write():
            rollout = self.rollout(rollout_id)
            frozen = rollout.state in ("taken", "trained")
            if frozen:
                metrics = to_json({**rollout.metrics, name: value})
                self._db.execute("UPDATE rollouts SET metrics = ? WHERE id = ?", (metrics, rollout_id))
            else:
                self._db.execute(
                    "INSERT INTO posted_scores VALUES (?, ?, ?, ?, ?) "
                    "ON CONFLICT (rollout_id, name) DO UPDATE SET value = excluded.value, "
                    "source = excluded.source, at = excluded.at",
                    (rollout_id, name, value, source, self.now()),
                )
                self._db.execute(
                    "UPDATE rollouts SET rescore = 1 WHERE id = ? AND state IN ('scored', 'grouped')",
                    (rollout_id,),
                )
        if frozen:
            raise RewardFrozen(rollout_id, rollout.batch_id or "")

    def posted_scores(self, rollout_id: str) -> dict[str, float]:
        rows = self._rows("SELECT name, value FROM posted_scores WHERE rollout_id = ?", (rollout_id,))
        return dict(rows)

    # -- groups ------------------------------------------------------------------------------

    def open_groups(self, limit: int = 1000) -> list[Group]:
        sql = (
            f"SELECT {GROUP_COLUMNS} FROM groups WHERE state = 'open' AND passive_key IS NULL "
            "ORDER BY created_at, id LIMIT ?"
        )
        return [group_from(row) for row in self._rows(sql, (limit,))]

    def group(self, group_id: str) -> Group:
        row = self._row(f"SELECT {GROUP_COLUMNS} FROM groups WHERE id = ?", (group_id,))
        if row is None:
            raise NotFound(f"no group {group_id}")
        return group_from(row)

    def close_group(self, group_id: str, members: Sequence[str], drops: Mapping[str, str]) -> None:
        with self._write():
            group = self.group(group_id)
            if group.state != "open":
                return
            rows = self._rows("SELECT id, state FROM rollouts WHERE group_id = ?", (group_id,))
            states: dict[str, str] = dict(rows)
            if unscored := [member for member in members if states.get(member) != "scored"]:
                raise Conflict(f"group {group_id}: {unscored} are not scored members")
            for rollout_id in states.keys() - set(members):
                self._drop([rollout_id], drops.get(rollout_id, "not_in_group"))
            if len(members) < group.members_min:
                self._drop_group(group_id, "group_too_small")
                return
            self._db.executemany(
                "UPDATE rollouts SET state = 'grouped' WHERE id = ?", [(member,) for member in members]
            )
            self._db.execute(
                "UPDATE groups SET state = 'closed', closed_at = ? WHERE id = ?", (self.now(), group_id)
            )
