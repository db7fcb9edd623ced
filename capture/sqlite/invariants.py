"""What must hold at every moment, each as a query that finds the rows for which it does not."""

from typing import Final

from capture.sqlite.drops import OWNED

_OWNED = OWNED.format(rollout="rollouts.id")

INVARIANTS: Final[tuple[tuple[str, str], ...]] = (
    (
        "its call_count is not the number of its calls",
        "SELECT id FROM rollouts "
        "WHERE call_count != (SELECT count(*) FROM calls WHERE rollout_id = rollouts.id)",
    ),
    (
        "a call has another mode than its rollout, or one of the two is for training",
        "SELECT calls.id FROM calls JOIN rollouts ON rollouts.id = rollout_id "
        "WHERE calls.mode != rollouts.mode OR calls.passive != rollouts.passive",
    ),
    (
        "it is trained though it was neither opened for that nor observed while a run was on",
        "SELECT id FROM rollouts WHERE passive AND (mode != 'observe' OR run_id IS NULL)",
    ),
    (
        "its group gathers the observed rollouts of another run, key or scenario, or it was not observed",
        "SELECT rollouts.id FROM rollouts JOIN groups ON groups.id = group_id "
        "WHERE (passive_key IS NOT NULL OR passive) AND (NOT passive OR passive_key IS NOT key_id "
        "OR groups.run_id IS NOT rollouts.run_id OR groups.scenario_id IS NOT rollouts.scenario_id)",
    ),
    (
        "the frame of a call that waits for ingest is gone",
        "SELECT calls.id FROM calls LEFT JOIN frames ON frames.id = frame_id "
        "WHERE calls.ingested_at IS NULL AND frames.id IS NULL",
    ),
    (
        "frame counts other calls than those that wait for ingest",
        "SELECT id FROM frames WHERE remaining != "
        "(SELECT count(*) FROM calls WHERE frame_id = frames.id AND ingested_at IS NULL) "
        "OR (remaining = 0) != (ingested_at IS NOT NULL)",
    ),
    (
        "ingested and stored content disagree",
        "SELECT calls.id FROM calls LEFT JOIN contents ON contents.n = calls.n "
        "WHERE (calls.ingested_at IS NOT NULL) != (contents.n IS NOT NULL)",
    ),
    (
        "its stored tokens have another length than they should",
        "SELECT calls.id FROM calls JOIN contents ON contents.n = calls.n "
        "WHERE (token_form < 2 AND length(tokens) != "
        "(4 - token_form) * (prompt_count + sampled_count - shared_tokens)) "
        "OR (excluded IS NULL AND length(logprobs) != 4 * sampled_count)",
    ),
    (
        "it is stored as a difference to something that is not an earlier call of its rollout",
        "SELECT calls.id FROM calls JOIN contents ON contents.n = calls.n JOIN calls AS earlier "
        "ON earlier.n = contents.base WHERE earlier.n >= calls.n OR earlier.rollout_id != calls.rollout_id",
    ),
    (
        "it is out of the pipeline without a counted drop",
        "SELECT id FROM rollouts WHERE for_training AND state IN ('dropped', 'failed', 'reward_error') "
        "AND NOT EXISTS (SELECT 1 FROM drops WHERE rollout_id = rollouts.id AND reason = drop_reason)",
    ),
    (
        "it has a drop but is still in the pipeline, or was never to be trained",
        "SELECT id FROM rollouts JOIN drops ON rollout_id = id "
        "WHERE NOT for_training OR state NOT IN ('dropped', 'failed', 'reward_error')",
    ),
    (
        "its drop counts other tokens than its calls have",
        f"SELECT id FROM rollouts JOIN drops ON rollout_id = id WHERE tokens != ({_OWNED})",
    ),
    (
        "it is in the ledger with other tokens than its calls have",
        "SELECT id FROM rollouts JOIN ledger ON rollout_id = id "
        f"WHERE trained_tokens + zero_advantage_tokens != ({_OWNED})",
    ),
    (
        "it is in the ledger more than once",
        "SELECT rollout_id FROM ledger GROUP BY rollout_id HAVING count(*) > 1",
    ),
    (
        "trained and in the ledger of a committed batch are not the same",
        "SELECT rollouts.id FROM rollouts LEFT JOIN ledger ON rollout_id = rollouts.id "
        "LEFT JOIN batches ON batches.id = ledger.batch_id "
        "WHERE (rollouts.state = 'trained') != (coalesce(batches.state, '') = 'committed')",
    ),
    (
        "it is in another state than its batch",
        "SELECT rollouts.id FROM rollouts JOIN batches ON batches.id = rollouts.batch_id "
        "WHERE (batches.state = 'taken') != (rollouts.state = 'taken') "
        "OR (batches.state = 'committed') != (rollouts.state = 'trained')",
    ),
    (
        "group is in another state than its batch",
        "SELECT groups.id FROM groups LEFT JOIN batches ON batches.id = groups.batch_id "
        "WHERE (groups.state = 'taken') != (coalesce(batches.state, '') = 'taken') "
        "OR (groups.state = 'trained') != (coalesce(batches.state, '') = 'committed')",
    ),
    (
        "it is grouped or taken, and its group is not",
        "SELECT rollouts.id FROM rollouts LEFT JOIN groups ON groups.id = group_id "
        "WHERE (rollouts.state = 'grouped' AND coalesce(groups.state, '') != 'closed') "
        "OR (rollouts.state = 'taken' AND coalesce(groups.state, '') != 'taken')",
    ),
    (
        "a scored, grouped, taken or trained rollout has no reward",
        "SELECT id FROM rollouts WHERE state IN ('scored', 'grouped', 'taken', 'trained') AND reward IS NULL",
    ),
    (
        "the run has ended and the rollout still waits",
        "SELECT rollouts.id FROM rollouts JOIN runs ON runs.id = run_id WHERE end_reason IS NOT NULL "
        "AND for_training AND drop_reason IS NULL AND state != 'trained'",
    ),
    (
        "its head is not a version of its policy",
        "SELECT lineages.id FROM lineages LEFT JOIN versions "
        "ON versions.policy = lineages.policy AND versions.version = head_version "
        "WHERE versions.version IS NULL",
    ),
    (
        "its active or promoted version does not exist",
        "SELECT policy FROM policies WHERE "
        "2 - (active = promoted) != (SELECT count(*) FROM versions WHERE versions.policy = policies.policy "
        "AND version IN (active, promoted))",
    ),
    (
        "a version does not follow its parent by one, or its number was not given out yet",
        "SELECT child.policy || '@v' || child.version FROM versions AS child "
        "JOIN policies ON policies.policy = child.policy LEFT JOIN versions AS parent "
        "ON parent.policy = child.policy AND parent.version = child.parent "
        "WHERE child.version >= next_version "
        "OR (child.version > 0 AND coalesce(parent.distance, -9) + 1 != child.distance)",
    ),
)
"""``(what is wrong, SELECT of the ids for which it is)``; in a sound store every query is empty."""
