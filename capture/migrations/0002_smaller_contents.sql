-- How the tokens and messages of a content are stored; what the numbers mean stands in
-- capture/sqlite/content.py. Rows that are there stay as they are: their form is 0.
ALTER TABLE contents ADD COLUMN token_form INTEGER NOT NULL DEFAULT 0;
ALTER TABLE contents ADD COLUMN message_form INTEGER NOT NULL DEFAULT 0;

-- The header `Idempotency-Key`, by which a client says that a request is an earlier one once more.
ALTER TABLE calls ADD COLUMN idempotency_key TEXT;
