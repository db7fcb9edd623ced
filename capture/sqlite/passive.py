"""Observed rollouts that are trained: decided when they are settled, grouped when they are scored."""

from typing import Any

from capture.ids import new_id
from capture.sqlite.drops import OWNED
from capture.sqlite.rollouts import Rollouts
from capture.types import Group, Rollout

GROUP_COLUMNS = "id, run_id, scenario_id, size, state, created_at, closed_at, batch_id"


class Passive(Rollouts):
    """What scoring does with rollouts that nobody opened for training; in the caller's transaction."""

    def _admit(self, rollout: Rollout) -> None:
        """For training from now on, if its policy answered it and a run of that policy is on. One that names
        a group or a run belongs to whoever opened it, and stays observed."""
        if rollout.mode != "observe" or rollout.group_id is not None or rollout.run_id is not None:
            return
        run_id = self._live_run(rollout.policy)
        answered = self._value(
            "SELECT 1 FROM calls WHERE rollout_id = ? AND policy = ? AND late = 0 AND sampled_tokens > 0",
            (rollout.id, rollout.policy),
        )
        if run_id is None or not answered:
            return
        self._db.execute("UPDATE rollouts SET passive = 1, run_id = ? WHERE id = ?", (run_id, rollout.id))
        self._db.execute("UPDATE calls SET passive = 1 WHERE rollout_id = ?", (rollout.id,))

    def _gather(self, rollout: Rollout, size: int) -> bool:
        """Put a scored rollout into the open group of its run, key and scenario, which is opened with this
        size where there is none. False: it can be compared with no other, or has nothing to train."""
        if not rollout.passive or rollout.headless or rollout.scenario_id is None:
            return False
        if not self._value(OWNED.format(rollout="?"), (rollout.id,)):
            return False
        place = (rollout.run_id, rollout.key_id, rollout.scenario_id)
        group_id = self._value(
            "SELECT id FROM groups WHERE run_id = ? AND passive_key = ? AND scenario_id = ? "
            "AND state = 'open' AND filled = 0",
            place,
        )
        if group_id is None:
            group_id = new_id("g")
            self._db.execute(
                "INSERT INTO groups (run_id, passive_key, scenario_id, id, size, state, created_at) "
                "VALUES (?, ?, ?, ?, ?, 'open', ?)",
                (*place, group_id, size, self.now()),
            )
        self._db.execute("UPDATE rollouts SET group_id = ? WHERE id = ?", (group_id, rollout.id))
        self._db.execute(
            "UPDATE groups SET filled = 1 WHERE id = ?1 AND size > 0 "
            "AND size <= (SELECT count(*) FROM rollouts WHERE group_id = ?1)",
            (group_id,),
        )
        return True

    def gathered_groups(self, older_than_s: float, limit: int = 100) -> list[Group]:
        sql = (
            f"SELECT {GROUP_COLUMNS} FROM groups WHERE state = 'open' AND passive_key IS NOT NULL "
            "AND (filled = 1 OR created_at <= ?) ORDER BY created_at, id LIMIT ?"
        )
        return [group_from(row) for row in self._rows(sql, (self.now() - older_than_s, limit))]


def group_from(row: tuple[Any, ...]) -> Group:
    """A row of `GROUP_COLUMNS` as a Group."""
    return Group(**dict(zip(GROUP_COLUMNS.split(", "), row, strict=True)))
