"""Scoring again what had its turn: whole groups, and nothing that a batch took."""

import math
from collections.abc import Sequence

from capture.errors import Conflict, RewardFrozen
from capture.sqlite.rollouts import to_json
from capture.sqlite.scoring import Scoring
from capture.store import Rescored
from capture.types import Rollout

HAD_ITS_TURN = frozenset({"scored", "grouped", "reward_error", "dropped"})


class Rescoring(Scoring):
    """The method of `capture.store.Store` that replaces scores."""

    def rescore(self, rescored: Sequence[Rescored], *, group_size: int = 0) -> None:
        for one in rescored:
            if not math.isfinite(one.reward):
                raise ValueError(f"reward {one.reward} of {one.rollout_id} is not a finite number")
        with self._write():
            rollouts = [self._replaceable(one) for one in rescored]
            for one, rollout in zip(rescored, rollouts, strict=True):
                self._replace(one, rollout, group_size)
            compared = [one for one in rollouts if one.for_training and one.group_id is not None]
            self._refuse_parts([self.rollout(one.id) for one in compared], rescored)

    def _replaceable(self, one: Rescored) -> Rollout:
        rollout = self.rollout(one.rollout_id)
        if rollout.batch_id is not None:
            raise RewardFrozen(rollout.id, rollout.batch_id)
        unscored = rollout.reward is None and rollout.reward_error is None
        if rollout.state not in HAD_ITS_TURN or unscored:
            raise Conflict(f"rollout {rollout.id} is {rollout.state}: it had no score that could be replaced")
        if self.posted_scores(rollout.id) != one.posted:
            raise Conflict(f"rollout {rollout.id}: a score was posted meanwhile")
        return rollout

    def _replace(self, one: Rescored, rollout: Rollout, group_size: int) -> None:
        self._db.execute(
            "UPDATE rollouts SET reward = ?, scores = ?, script_hash = ?, reward_error = NULL WHERE id = ?",
            (one.reward, to_json(one.scores), one.script_hash, rollout.id),
        )
        if rollout.state != "reward_error":
            return
        back = not rollout.for_training or self._has_a_place(rollout)
        if back and rollout.for_training:
            self._db.execute("DELETE FROM drops WHERE rollout_id = ?", (rollout.id,))
        state, reason = ("scored", None) if back else ("dropped", rollout.drop_reason)
        self._db.execute(
            "UPDATE rollouts SET state = ?, drop_reason = ? WHERE id = ?", (state, reason, rollout.id)
        )
        if back and rollout.passive and not self._gather(rollout, group_size):
            self._drop([rollout.id], "ungrouped")

    def _has_a_place(self, rollout: Rollout) -> bool:
        """Whether a group may still take a rollout for training that was not scored."""
        if rollout.drop_reason != "reward_error" or self._ended(rollout.run_id):
            return False
        return rollout.passive if rollout.group_id is None else self.group(rollout.group_id).state == "open"

    def _refuse_parts(self, rollouts: Sequence[Rollout], rescored: Sequence[Rescored]) -> None:
        """No group in the pipeline may keep a member with the score of another script."""
        hashes = {one.script_hash for one in rescored}
        for group_id in {one.group_id for one in rollouts if one.drop_reason is None}:
            rows = self._rows(
                "SELECT id, script_hash FROM rollouts WHERE group_id = ? AND for_training "
                "AND drop_reason IS NULL AND state IN ('scored', 'grouped')",
                (group_id,),
            )
            for rollout_id, script_hash in rows:
                if script_hash not in hashes:
                    raise Conflict(f"group {group_id}: {rollout_id} would keep the score of another script")
