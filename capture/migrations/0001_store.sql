-- Times are Unix seconds; ids are text. JSON columns are NULL where the value is the default.

CREATE TABLE leases (
    name        TEXT PRIMARY KEY,
    holder      TEXT NOT NULL,
    epoch       INTEGER NOT NULL,       -- rises with every change of holder: the fence
    expires_at  REAL NOT NULL
);

CREATE TABLE policies (
    policy        TEXT PRIMARY KEY,
    active        INTEGER NOT NULL,
    promoted      INTEGER NOT NULL,
    next_version  INTEGER NOT NULL      -- never reused
);

CREATE TABLE versions (
    policy        TEXT NOT NULL,
    version       INTEGER NOT NULL,
    lineage       TEXT NOT NULL,
    parent        INTEGER,
    step          INTEGER NOT NULL,
    state         TEXT NOT NULL,
    path          TEXT,
    sha256        TEXT,
    created_at    REAL NOT NULL,
    activated_at  REAL,
    distance      INTEGER NOT NULL,
    PRIMARY KEY (policy, version)
);

CREATE TABLE engine_versions (
    engine     TEXT NOT NULL,           -- one incarnation of an engine
    policy     TEXT NOT NULL,
    version    INTEGER NOT NULL,
    state      TEXT NOT NULL,
    detail     TEXT NOT NULL,
    in_flight  INTEGER NOT NULL,
    at         REAL NOT NULL,
    PRIMARY KEY (policy, version, engine)
);

CREATE TABLE runs (
    id          TEXT PRIMARY KEY,
    policy      TEXT NOT NULL,
    settings    TEXT NOT NULL,          -- JSON
    created_at  REAL NOT NULL,
    end_reason  TEXT
);

CREATE TABLE lineages (
    id             TEXT PRIMARY KEY,
    run_id         TEXT NOT NULL UNIQUE REFERENCES runs (id),
    policy         TEXT NOT NULL,
    start_version  INTEGER NOT NULL,
    head_version   INTEGER NOT NULL,
    step           INTEGER NOT NULL,
    checkpoint     TEXT,
    ended          INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE groups (
    id           TEXT PRIMARY KEY,
    run_id       TEXT,
    scenario_id  TEXT,
    size         INTEGER NOT NULL,
    state        TEXT NOT NULL,
    created_at   REAL NOT NULL,
    closed_at    REAL,
    batch_id     TEXT
);
CREATE INDEX groups_run ON groups (run_id, state, closed_at);
CREATE INDEX groups_state ON groups (state);
CREATE INDEX groups_batch ON groups (batch_id) WHERE batch_id IS NOT NULL;

CREATE TABLE rollouts (
    id              TEXT PRIMARY KEY,
    key_id          TEXT NOT NULL,
    mode            TEXT NOT NULL,
    state           TEXT NOT NULL,
    status          TEXT,
    run_id          TEXT,
    scenario_id     TEXT,
    group_id        TEXT REFERENCES groups (id),
    attempt         INTEGER NOT NULL,
    replaces        TEXT,
    session         TEXT,
    headless        INTEGER NOT NULL,
    policy          TEXT,
    policy_version  INTEGER,
    secret_hash     BLOB,
    call_count      INTEGER NOT NULL,
    max_calls       INTEGER,
    created_at      REAL NOT NULL,
    last_call_at    REAL,
    sealed_at       REAL,
    reward          REAL,
    reward_error    TEXT,
    script_hash     TEXT,
    drop_reason     TEXT,
    batch_id        TEXT,
    rescore         INTEGER NOT NULL DEFAULT 0,  -- a score was posted after the reward was computed
    scores          TEXT,                        -- JSON
    metrics         TEXT,                        -- JSON
    scenario        TEXT,                        -- JSON
    metadata        TEXT,                        -- JSON
    stdout          TEXT NOT NULL
);
CREATE INDEX rollouts_state ON rollouts (state);
CREATE INDEX rollouts_run ON rollouts (run_id, state);
CREATE INDEX rollouts_group ON rollouts (group_id) WHERE group_id IS NOT NULL;
CREATE INDEX rollouts_batch ON rollouts (batch_id) WHERE batch_id IS NOT NULL;
CREATE INDEX rollouts_rescore ON rollouts (id) WHERE rescore = 1;
CREATE UNIQUE INDEX rollouts_session ON rollouts (key_id, session)
    WHERE session IS NOT NULL AND state = 'open' AND mode = 'observe';

CREATE TABLE posted_scores (
    rollout_id  TEXT NOT NULL REFERENCES rollouts (id),
    name        TEXT NOT NULL,
    value       REAL NOT NULL,
    source      TEXT NOT NULL,
    at          REAL NOT NULL,
    PRIMARY KEY (rollout_id, name)
);

-- Raw requests and responses, transient: deleted some time after the last of their calls is ingested.
CREATE TABLE frames (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,  -- never reused: readers cache by it
    body         BLOB NOT NULL,
    remaining    INTEGER NOT NULL,      -- calls that are not ingested yet
    ingested_at  REAL
);
CREATE INDEX frames_ingested ON frames (ingested_at) WHERE ingested_at IS NOT NULL;

CREATE TABLE calls (
    n                  INTEGER PRIMARY KEY,
    id                 TEXT NOT NULL UNIQUE,
    rollout_id         TEXT NOT NULL REFERENCES rollouts (id),
    key_id             TEXT NOT NULL,
    mode               TEXT NOT NULL,   -- that of the rollout
    policy             TEXT,
    policy_version     INTEGER,
    frame_id           INTEGER NOT NULL,
    place              INTEGER NOT NULL,
    started_at         REAL NOT NULL,
    ended_at           REAL NOT NULL,
    status             INTEGER NOT NULL,
    retry_count        INTEGER NOT NULL,
    body_hash          BLOB NOT NULL,
    late               INTEGER NOT NULL,
    undelivered        INTEGER NOT NULL DEFAULT 0,
    failed             INTEGER NOT NULL,
    error              TEXT,
    ingested_at        REAL,
    prompt_tokens      INTEGER,
    completion_tokens  INTEGER,
    sampled_tokens     INTEGER,         -- what the balance counts
    finish_reason      TEXT,
    excluded           TEXT             -- why its tokens are not trained
);
CREATE INDEX calls_rollout ON calls (rollout_id);
CREATE INDEX calls_pending ON calls (n) WHERE ingested_at IS NULL;
CREATE INDEX calls_pending_rollout ON calls (rollout_id) WHERE ingested_at IS NULL;
CREATE INDEX calls_failed ON calls (rollout_id) WHERE failed = 1;
CREATE INDEX calls_excluded ON calls (excluded) WHERE excluded IS NOT NULL;

CREATE TABLE blobs (
    hash  BLOB PRIMARY KEY,             -- BLAKE2b-128 of body
    body  BLOB NOT NULL
);

-- A call as a difference to an earlier one of its rollout.
CREATE TABLE contents (
    n                INTEGER PRIMARY KEY REFERENCES calls (n),
    base             INTEGER REFERENCES contents (n),
    shared_tokens    INTEGER NOT NULL,  -- leading tokens equal to base's prompt + sampled
    shared_messages  INTEGER NOT NULL,  -- leading messages equal to base's request + response
    prompt_count     INTEGER NOT NULL,
    sampled_count    INTEGER NOT NULL,
    tokens           BLOB NOT NULL,     -- int32 little-endian: prompt + sampled past the shared ones
    logprobs         BLOB NOT NULL,     -- float32 little-endian, one for each sampled token
    messages         BLOB NOT NULL,     -- JSON array past the shared ones, zstd where that is smaller
    has_response     INTEGER NOT NULL,  -- the last message is the response
    tools            BLOB REFERENCES blobs (hash),
    model            TEXT NOT NULL,
    temperature      REAL NOT NULL
);

CREATE TABLE batches (
    id            TEXT PRIMARY KEY,
    run_id        TEXT NOT NULL REFERENCES runs (id),
    state         TEXT NOT NULL,
    taken_at      REAL NOT NULL,
    committed_at  REAL,
    version       INTEGER,              -- the version that its commit made, if any
    reason        TEXT
);
CREATE INDEX batches_run ON batches (run_id, state);

CREATE TABLE ledger (
    lineage                TEXT NOT NULL,
    rollout_id             TEXT NOT NULL REFERENCES rollouts (id),
    batch_id               TEXT NOT NULL REFERENCES batches (id),
    trained_tokens         INTEGER NOT NULL,
    zero_advantage_tokens  INTEGER NOT NULL,
    advantage              REAL NOT NULL,
    PRIMARY KEY (lineage, rollout_id)
);
CREATE INDEX ledger_rollout ON ledger (rollout_id);

CREATE TABLE drops (
    rollout_id  TEXT PRIMARY KEY REFERENCES rollouts (id),
    reason      TEXT NOT NULL,
    tokens      INTEGER NOT NULL,       -- its trainable sampled tokens, kept true as calls are ingested
    at          REAL NOT NULL
);

CREATE TABLE steps (
    batch_id      TEXT PRIMARY KEY REFERENCES batches (id),
    run_id        TEXT NOT NULL REFERENCES runs (id),
    step          INTEGER NOT NULL,
    version       INTEGER NOT NULL,
    committed_at  REAL NOT NULL,
    metrics       TEXT NOT NULL         -- JSON
);
CREATE INDEX steps_run ON steps (run_id, step);

CREATE TABLE metrics (
    id       INTEGER PRIMARY KEY,
    run_id   TEXT NOT NULL,
    kind     TEXT NOT NULL,
    at       REAL NOT NULL,
    body     TEXT NOT NULL              -- JSON
);
CREATE INDEX metrics_run ON metrics (run_id, kind, id);

CREATE TABLE in_flight (
    holder      TEXT PRIMARY KEY,
    expires_at  REAL NOT NULL,
    rollouts    TEXT NOT NULL           -- JSON object: rollout id -> calls in flight
);
