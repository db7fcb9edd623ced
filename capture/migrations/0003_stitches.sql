-- By what a later call is recognised that names no rollout: digests of a conversation up to an answer, and
-- of random tool call ids in it. Written with the call that was answered, deleted some time later.
CREATE TABLE stitches (
    key_id      TEXT NOT NULL,
    digest      BLOB NOT NULL,
    rollout_id  TEXT,                   -- NULL: several were given it, which stays so
    call_id     TEXT,                   -- that wrote it last
    at          REAL NOT NULL,
    PRIMARY KEY (key_id, digest)
) WITHOUT ROWID;
CREATE INDEX stitches_at ON stitches (at);
