-- the marker table
CREATE TABLE processed_message (
    message_id VARCHAR(512) NOT NULL,
    handler VARCHAR(255) NOT NULL,
    processed_at DATETIME DEFAULT CURRENT_TIMESTAMP NOT NULL,
    occurred_at DATETIME,
    digest BLOB,
    CONSTRAINT pk_processed_message PRIMARY KEY (message_id, handler)
)

-- its index ix_processed_message_processed_at
CREATE INDEX ix_processed_message_processed_at ON processed_message (processed_at)

-- the state table
CREATE TABLE processed_message_state (
    "key" VARCHAR(255) NOT NULL,
    value TEXT NOT NULL,
    CONSTRAINT pk_processed_message_state PRIMARY KEY ("key")
)

-- claim
INSERT INTO processed_message (message_id, handler, occurred_at) VALUES (?, ?, ?) ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with claim_timeout
INSERT INTO processed_message (message_id, handler, occurred_at) VALUES (?, ?, ?) ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with a former name
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3 UNION ALL SELECT ? AS anon_4, ? AS anon_5, ? AS anon_6 ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with both
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3 UNION ALL SELECT ? AS anon_4, ? AS anon_5, ? AS anon_6 ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with a digest
INSERT INTO processed_message (message_id, handler, occurred_at, digest) VALUES (?, ?, ?, ?) ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with a digest and a former name
INSERT INTO processed_message (message_id, handler, occurred_at, digest) SELECT ? AS anon_1, ? AS anon_2, ? AS anon_3, ? AS anon_4 UNION ALL SELECT ? AS anon_5, ? AS anon_6, ? AS anon_7, ? AS anon_8 ON CONFLICT (message_id, handler) DO NOTHING

-- is the marker there? (for the text of an error)
SELECT 1
FROM processed_message
WHERE processed_message.message_id = ? AND processed_message.handler = ?

-- has the duplicate another body?
SELECT processed_message.digest
FROM processed_message
WHERE processed_message.message_id = ? AND processed_message.handler IN (?) AND processed_message.digest != ?
 LIMIT ? OFFSET ?

-- prune one batch
DELETE FROM processed_message WHERE rowid IN (SELECT rowid
FROM processed_message
WHERE processed_message.processed_at < ? AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < ?) ORDER BY processed_message.processed_at
 LIMIT ? OFFSET ?)

-- prune one batch of a handler
DELETE FROM processed_message WHERE rowid IN (SELECT rowid
FROM processed_message
WHERE processed_message.processed_at < ? AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < ?) AND processed_message.handler = ? ORDER BY processed_message.processed_at
 LIMIT ? OFFSET ?)

-- is anything left to prune?
SELECT 1
FROM processed_message
WHERE processed_message.processed_at < ? AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < ?)
 LIMIT ? OFFSET ?

-- the record table
CREATE TABLE processed_command (
    message_id VARCHAR(512) NOT NULL,
    handler VARCHAR(255) NOT NULL,
    processed_at DATETIME DEFAULT CURRENT_TIMESTAMP NOT NULL,
    occurred_at DATETIME,
    fingerprint BLOB,
    outcome SMALLINT,
    codec VARCHAR(64),
    result BLOB,
    CONSTRAINT pk_processed_command PRIMARY KEY (message_id, handler)
)

-- record the outcome of a command
UPDATE processed_command SET fingerprint=?, outcome=?, codec=?, result=? WHERE processed_command.message_id = ? AND processed_command.handler IN (?) AND processed_command.outcome IS NULL

-- the same, with a former name
UPDATE processed_command SET fingerprint=?, outcome=?, codec=?, result=? WHERE processed_command.message_id = ? AND processed_command.handler IN (?, ?) AND processed_command.outcome IS NULL

-- recall the outcome of a command
SELECT processed_command.fingerprint, processed_command.outcome, processed_command.codec, processed_command.result, processed_command.processed_at
FROM processed_command
WHERE processed_command.message_id = ? AND processed_command.handler IN (?)

-- the same, under its former name
SELECT processed_command.fingerprint, processed_command.outcome, processed_command.codec, processed_command.result, processed_command.processed_at
FROM processed_command
WHERE processed_command.message_id = ? AND processed_command.handler IN (?, ?) ORDER BY CASE WHEN (processed_command.outcome IS NULL) THEN ? ELSE ? END
 LIMIT ? OFFSET ?
