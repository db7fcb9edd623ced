-- When somebody asked that another version be promoted, and what came of it. The newest one that was served is
-- the promoted version; a store from before has that in `policies` alone.
CREATE TABLE promotions (
    n          INTEGER PRIMARY KEY,
    policy     TEXT NOT NULL,
    version    INTEGER NOT NULL,
    kind       TEXT NOT NULL,           -- promote | rollback
    asked_at   REAL NOT NULL,
    replaced   INTEGER,                 -- the version that was served until then
    served_at  REAL,                    -- from when it is served; NULL: not, or not yet
    reason     TEXT,                    -- why it never was
    FOREIGN KEY (policy, version) REFERENCES versions (policy, version)
);
CREATE UNIQUE INDEX promotions_open ON promotions (policy) WHERE served_at IS NULL AND reason IS NULL;
CREATE INDEX promotions_served ON promotions (policy, n) WHERE served_at IS NOT NULL;
