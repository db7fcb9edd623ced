-- How many tokens the calls of a key have used in all, for keys that have a budget. Written with the calls.
CREATE TABLE key_tokens (
    key_id  TEXT PRIMARY KEY,
    tokens  INTEGER NOT NULL
) WITHOUT ROWID;
