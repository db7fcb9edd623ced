-- contents.tokens: three bytes a token (little-endian) where all of a row's ids fit, else four as before.
-- contents.messages: a row may begin with 0x01; then a zstd frame follows whose dictionary is made of the
-- messages stored before it (capture/sqlite/content.py).
-- Rows that are there stay as they are and are read as before. This number keeps an older Hone, which
-- could not read the new ones, from opening the file.
SELECT 1;
