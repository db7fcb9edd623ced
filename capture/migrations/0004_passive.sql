-- Observed rollouts that are trained all the same. It is decided once, when the rollout is settled, and
-- written down here: no setting rewrites it later.
ALTER TABLE rollouts ADD COLUMN passive INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN for_training INTEGER GENERATED ALWAYS AS (mode = 'train' OR passive) VIRTUAL;
ALTER TABLE calls ADD COLUMN passive INTEGER NOT NULL DEFAULT 0;  -- that of the rollout
ALTER TABLE calls ADD COLUMN for_training INTEGER GENERATED ALWAYS AS (mode = 'train' OR passive) VIRTUAL;

-- Groups that gather such rollouts: those of one key, run and scenario, in the order of their scores.
ALTER TABLE groups ADD COLUMN passive_key TEXT;                 -- whose rollouts; NULL: a declared group
ALTER TABLE groups ADD COLUMN filled INTEGER NOT NULL DEFAULT 0;  -- takes no more of them
CREATE UNIQUE INDEX groups_gathering ON groups (run_id, passive_key, scenario_id)
    WHERE passive_key IS NOT NULL AND state = 'open' AND filled = 0;
CREATE INDEX groups_passive ON groups (created_at) WHERE passive_key IS NOT NULL AND state = 'open';
