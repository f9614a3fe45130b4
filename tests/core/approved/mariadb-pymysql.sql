-- the marker table
CREATE TABLE processed_message (
    message_id VARBINARY(512) NOT NULL,
    handler VARBINARY(255) NOT NULL,
    processed_at DATETIME(6) NOT NULL DEFAULT (utc_timestamp(6)),
    occurred_at DATETIME(6),
    digest MEDIUMBLOB,
    CONSTRAINT pk_processed_message PRIMARY KEY (message_id, handler)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4

-- its index ix_processed_message_processed_at
CREATE INDEX ix_processed_message_processed_at ON processed_message (processed_at)

-- the state table
CREATE TABLE processed_message_state (
    `key` VARBINARY(255) NOT NULL,
    value TEXT NOT NULL,
    CONSTRAINT pk_processed_message_state PRIMARY KEY (`key`)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4

-- claim
INSERT INTO processed_message (message_id, handler, processed_at, occurred_at) VALUES (unhex(%(message_id)s), unhex(%(handler)s), (utc_timestamp(6)), %(occurred_at)s)

-- claim, with claim_timeout
SET STATEMENT max_statement_time = %(wait_ms)s / 1000, innodb_lock_wait_timeout = %(wait_ms)s div 1000 + 2 FOR INSERT INTO processed_message (message_id, handler, processed_at, occurred_at) VALUES (unhex(%(message_id)s), unhex(%(handler)s), (utc_timestamp(6)), %(occurred_at)s)

-- claim, with a former name
INSERT INTO processed_message (message_id, handler, occurred_at, processed_at) SELECT unhex(%(message_id)s) AS anon_1, unhex(%(handler_0)s) AS anon_2, %(occurred_at)s AS anon_3, (utc_timestamp(6)) AS anon_4 UNION ALL SELECT unhex(%(message_id)s) AS anon_5, unhex(%(handler_1)s) AS anon_6, %(occurred_at)s AS anon_7, (utc_timestamp(6)) AS anon_8

-- claim, with both
SET STATEMENT max_statement_time = %(wait_ms)s / 1000, innodb_lock_wait_timeout = %(wait_ms)s div 1000 + 2 FOR INSERT INTO processed_message (message_id, handler, occurred_at, processed_at) SELECT unhex(%(message_id)s) AS anon_1, unhex(%(handler_0)s) AS anon_2, %(occurred_at)s AS anon_3, (utc_timestamp(6)) AS anon_4 UNION ALL SELECT unhex(%(message_id)s) AS anon_5, unhex(%(handler_1)s) AS anon_6, %(occurred_at)s AS anon_7, (utc_timestamp(6)) AS anon_8

-- claim, with a digest
INSERT INTO processed_message (message_id, handler, processed_at, occurred_at, digest) VALUES (unhex(%(message_id)s), unhex(%(handler)s), (utc_timestamp(6)), %(occurred_at)s, unhex(%(digest)s))

-- claim, with a digest and a former name
INSERT INTO processed_message (message_id, handler, occurred_at, processed_at, digest) SELECT unhex(%(message_id)s) AS anon_1, unhex(%(handler_0)s) AS anon_2, %(occurred_at)s AS anon_3, (utc_timestamp(6)) AS anon_4, unhex(%(digest)s) AS anon_5 UNION ALL SELECT unhex(%(message_id)s) AS anon_6, unhex(%(handler_1)s) AS anon_7, %(occurred_at)s AS anon_8, (utc_timestamp(6)) AS anon_9, unhex(%(digest)s) AS anon_10

-- claim of several
INSERT INTO processed_message (message_id, handler, processed_at, occurred_at)
    SELECT unhex(message_id), unhex(handler), utc_timestamp(6), occurred_at
    FROM json_table(convert(unhex(%(given)s) USING utf8mb4), '$[*]' COLUMNS (
        message_id VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$[0]',
        handler VARCHAR(510) CHARACTER SET utf8mb4 PATH '$[1]',
        occurred_at DATETIME(6) PATH '$[2]'
    )) AS given

-- claim of several, with claim_timeout
SET STATEMENT max_statement_time = %(wait_ms)s / 1000, innodb_lock_wait_timeout = %(wait_ms)s div 1000 + 2 FOR INSERT INTO processed_message (message_id, handler, processed_at, occurred_at)
    SELECT unhex(message_id), unhex(handler), utc_timestamp(6), occurred_at
    FROM json_table(convert(unhex(%(given)s) USING utf8mb4), '$[*]' COLUMNS (
        message_id VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$[0]',
        handler VARCHAR(510) CHARACTER SET utf8mb4 PATH '$[1]',
        occurred_at DATETIME(6) PATH '$[2]'
    )) AS given

-- claim of several, with digests
INSERT INTO processed_message (message_id, handler, processed_at, occurred_at, digest)
    SELECT unhex(message_id), unhex(handler), utc_timestamp(6), occurred_at, unhex(digest)
    FROM json_table(convert(unhex(%(given)s) USING utf8mb4), '$[*]' COLUMNS (
        message_id VARCHAR(1024) CHARACTER SET utf8mb4 PATH '$[0]',
        handler VARCHAR(510) CHARACTER SET utf8mb4 PATH '$[1]',
        occurred_at DATETIME(6) PATH '$[2]',
        digest VARCHAR(32) CHARACTER SET utf8mb4 PATH '$[3]'
    )) AS given

-- which of them did the claim meet?
SELECT CAST(processed_message.message_id AS BINARY) = unhex(%(message_id)s) AND (CAST(processed_message.handler AS BINARY) = unhex(%(handler_0)s) OR CAST(processed_message.handler AS BINARY) = unhex(%(handler_1)s)) AS anon_1
FROM processed_message
WHERE processed_message.message_id = unhex(%(message_id)s) AND (processed_message.handler = unhex(%(handler_0)s) OR processed_message.handler = unhex(%(handler_1)s)) ORDER BY processed_message.handler
 LIMIT %(param_1)s LOCK IN SHARE MODE

-- was it this marker that the claim met?
SELECT CAST(processed_message.message_id AS BINARY) = unhex(%(message_id)s) AND CAST(processed_message.handler AS BINARY) = unhex(%(handler)s) AS anon_1
FROM processed_message
WHERE processed_message.message_id = unhex(%(message_id)s) AND processed_message.handler = unhex(%(handler)s) LOCK IN SHARE MODE

-- is the marker there? (for the text of an error)
SELECT 1
FROM processed_message
WHERE processed_message.message_id = unhex(%(message_id)s) AND processed_message.handler = unhex(%(handler)s)

-- has the duplicate another body?
SELECT processed_message.digest
FROM processed_message
WHERE processed_message.message_id = unhex(%(message_id)s) AND processed_message.handler IN (unhex(%(handler)s)) AND processed_message.digest != unhex(%(digest)s)
 LIMIT %(param_1)s

-- prune one batch
SET STATEMENT innodb_lock_wait_timeout = 1, sql_safe_updates = 0 FOR DELETE FROM processed_message USING processed_message, (SELECT processed_message.message_id AS message_id, processed_message.handler AS handler
FROM processed_message
WHERE processed_message.processed_at < %(cutoff)s AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < %(cutoff)s) ORDER BY processed_message.processed_at
 LIMIT %(batch_size)s FOR UPDATE SKIP LOCKED) AS batch WHERE processed_message.message_id = batch.message_id AND processed_message.handler = batch.handler

-- prune one batch of a handler
SET STATEMENT innodb_lock_wait_timeout = 1, sql_safe_updates = 0 FOR DELETE FROM processed_message USING processed_message, (SELECT processed_message.message_id AS message_id, processed_message.handler AS handler
FROM processed_message
WHERE processed_message.processed_at < %(cutoff)s AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < %(cutoff)s) AND processed_message.handler = unhex(%(handler)s) ORDER BY processed_message.processed_at
 LIMIT %(batch_size)s FOR UPDATE SKIP LOCKED) AS batch WHERE processed_message.message_id = batch.message_id AND processed_message.handler = batch.handler

-- is anything left to prune?
SELECT 1
FROM processed_message
WHERE processed_message.processed_at < %(cutoff)s AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < %(cutoff)s)
 LIMIT %(param_1)s

-- the record table
CREATE TABLE processed_command (
    message_id VARBINARY(512) NOT NULL,
    handler VARBINARY(255) NOT NULL,
    processed_at DATETIME(6) NOT NULL DEFAULT (utc_timestamp(6)),
    occurred_at DATETIME(6),
    fingerprint MEDIUMBLOB,
    outcome SMALLINT,
    codec VARBINARY(64),
    result MEDIUMBLOB,
    CONSTRAINT pk_processed_command PRIMARY KEY (message_id, handler)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4

-- record the outcome of a command
UPDATE processed_command SET fingerprint=unhex(%(the_fingerprint)s), outcome=%(the_outcome)s, codec=unhex(%(the_codec)s), result=unhex(%(the_result)s) WHERE processed_command.message_id = unhex(%(stored)s) AND processed_command.handler IN (unhex(%(name_0)s)) AND processed_command.outcome IS NULL

-- the same, with a former name
UPDATE processed_command SET fingerprint=unhex(%(the_fingerprint)s), outcome=%(the_outcome)s, codec=unhex(%(the_codec)s), result=unhex(%(the_result)s) WHERE processed_command.message_id = unhex(%(stored)s) AND processed_command.handler IN (unhex(%(name_0)s), unhex(%(name_1)s)) AND processed_command.outcome IS NULL

-- recall the outcome of a command
SELECT processed_command.fingerprint, processed_command.outcome, processed_command.codec, processed_command.result, processed_command.processed_at
FROM processed_command
WHERE processed_command.message_id = unhex(%(stored)s) AND processed_command.handler IN (unhex(%(name_0)s))

-- the same, under its former name
SELECT processed_command.fingerprint, processed_command.outcome, processed_command.codec, processed_command.result, processed_command.processed_at
FROM processed_command
WHERE processed_command.message_id = unhex(%(stored)s) AND processed_command.handler IN (unhex(%(name_0)s), unhex(%(name_1)s)) ORDER BY CASE WHEN (processed_command.outcome IS NULL) THEN %(param_1)s ELSE %(param_2)s END
 LIMIT %(param_3)s
