-- What a scenario has brought so far is asked for when a group has one member.
CREATE INDEX rollouts_trained ON rollouts (run_id, scenario_id, key_id, reward) WHERE state = 'trained';
