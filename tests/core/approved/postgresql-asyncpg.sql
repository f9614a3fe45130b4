-- the marker table
CREATE TABLE processed_message (
    message_id TEXT COLLATE "C" NOT NULL,
    handler TEXT COLLATE "C" NOT NULL,
    processed_at TIMESTAMP WITH TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL,
    occurred_at TIMESTAMP WITH TIME ZONE,
    digest BYTEA,
    CONSTRAINT pk_processed_message PRIMARY KEY (message_id, handler)
)

-- its index ix_processed_message_processed_at
CREATE INDEX ix_processed_message_processed_at ON processed_message (processed_at)

-- the state table
CREATE TABLE processed_message_state (
    key TEXT COLLATE "C" NOT NULL,
    value TEXT NOT NULL,
    CONSTRAINT pk_processed_message_state PRIMARY KEY (key)
)

-- claim
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT $1::VARCHAR AS anon_1, $2::VARCHAR AS anon_2, $3::TIMESTAMP WITH TIME ZONE AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with claim_timeout
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT $1::VARCHAR AS anon_1, $2::VARCHAR AS anon_2, $3::TIMESTAMP WITH TIME ZONE AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby, set_config($4::VARCHAR, concat($5::VARCHAR, $6::VARCHAR), $7::BOOLEAN) AS wait
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with a former name
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT $1::VARCHAR AS anon_1, $2::VARCHAR AS anon_2, CAST($3::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before UNION ALL SELECT $1::VARCHAR AS anon_4, $4::VARCHAR AS anon_5, CAST($3::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING RETURNING processed_message.handler

-- claim, with both
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT $1::VARCHAR AS anon_1, $2::VARCHAR AS anon_2, CAST($3::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby, set_config($4::VARCHAR, concat($5::VARCHAR, $6::VARCHAR), $7::BOOLEAN) AS wait
 LIMIT ALL OFFSET 0) AS before UNION ALL SELECT $1::VARCHAR AS anon_4, $8::VARCHAR AS anon_5, CAST($3::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby, set_config($4::VARCHAR, concat($5::VARCHAR, $6::VARCHAR), $7::BOOLEAN) AS wait
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING RETURNING processed_message.handler

-- claim, with a digest
INSERT INTO processed_message (message_id, handler, occurred_at, digest) SELECT $1::VARCHAR AS anon_1, $2::VARCHAR AS anon_2, $3::TIMESTAMP WITH TIME ZONE AS anon_3, $4::BYTEA AS anon_4
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with a digest and a former name
INSERT INTO processed_message (message_id, handler, occurred_at, digest) SELECT $1::VARCHAR AS anon_1, $2::VARCHAR AS anon_2, CAST($3::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3, CAST($4::BYTEA AS BYTEA) AS anon_4
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before UNION ALL SELECT $1::VARCHAR AS anon_5, $5::VARCHAR AS anon_6, CAST($3::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3, CAST($4::BYTEA AS BYTEA) AS anon_4
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING RETURNING processed_message.handler

-- is the marker there? (for the text of an error)
SELECT 1
FROM processed_message
WHERE processed_message.message_id = $1::VARCHAR COLLATE "C" AND processed_message.handler = $2::VARCHAR COLLATE "C"

-- has the duplicate another body?
SELECT processed_message.digest
FROM processed_message
WHERE processed_message.message_id = $1::VARCHAR COLLATE "C" AND processed_message.handler IN ($2::VARCHAR COLLATE "C") AND processed_message.digest != $3::BYTEA
 LIMIT $4::INTEGER

-- prune one batch
DELETE FROM processed_message WHERE (SELECT concat(set_config('lock_timeout', '100ms', true), set_config('synchronous_commit', 'off', true))) IS NOT NULL AND ctid = any(array((SELECT ctid
FROM processed_message
WHERE processed_message.processed_at < $1::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < $1::TIMESTAMP WITH TIME ZONE) ORDER BY processed_message.processed_at
 LIMIT $2::INTEGER FOR UPDATE SKIP LOCKED))) AND processed_message.processed_at < $1::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < $1::TIMESTAMP WITH TIME ZONE)

-- prune one batch of a handler
DELETE FROM processed_message WHERE (SELECT concat(set_config('lock_timeout', '100ms', true), set_config('synchronous_commit', 'off', true))) IS NOT NULL AND ctid = any(array((SELECT ctid
FROM processed_message
WHERE processed_message.processed_at < $1::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < $1::TIMESTAMP WITH TIME ZONE) AND processed_message.handler = $2::VARCHAR COLLATE "C" ORDER BY processed_message.processed_at
 LIMIT $3::INTEGER FOR UPDATE SKIP LOCKED))) AND processed_message.processed_at < $1::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < $1::TIMESTAMP WITH TIME ZONE) AND processed_message.handler = $2::VARCHAR COLLATE "C"

-- is anything left to prune?
SELECT 1
FROM processed_message
WHERE processed_message.processed_at < $1::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < $1::TIMESTAMP WITH TIME ZONE)
 LIMIT $2::INTEGER

-- the record table
CREATE TABLE processed_command (
    message_id TEXT COLLATE "C" NOT NULL,
    handler TEXT COLLATE "C" NOT NULL,
    processed_at TIMESTAMP WITH TIME ZONE DEFAULT CURRENT_TIMESTAMP NOT NULL,
    occurred_at TIMESTAMP WITH TIME ZONE,
    fingerprint BYTEA,
    outcome SMALLINT,
    codec TEXT COLLATE "C",
    result BYTEA,
    CONSTRAINT pk_processed_command PRIMARY KEY (message_id, handler)
)

-- record the outcome of a command
WITH changed AS
(UPDATE processed_command SET fingerprint=$4::BYTEA, outcome=$5::SMALLINT, codec=$6::VARCHAR COLLATE "C", result=$7::BYTEA WHERE processed_command.message_id = $8::VARCHAR COLLATE "C" AND processed_command.handler IN ($9::VARCHAR COLLATE "C") AND processed_command.outcome IS NULL RETURNING 1)
 SELECT count(*) / CAST(CASE WHEN (count(*) = $1::INTEGER) THEN $2::INTEGER ELSE $3::INTEGER END AS NUMERIC) AS anon_1
FROM changed

-- the same, with a former name
WITH changed AS
(UPDATE processed_command SET fingerprint=$4::BYTEA, outcome=$5::SMALLINT, codec=$6::VARCHAR COLLATE "C", result=$7::BYTEA WHERE processed_command.message_id = $8::VARCHAR COLLATE "C" AND processed_command.handler IN ($9::VARCHAR COLLATE "C", $10::VARCHAR COLLATE "C") AND processed_command.outcome IS NULL RETURNING 1)
 SELECT count(*) / CAST(CASE WHEN (count(*) = $1::INTEGER) THEN $2::INTEGER ELSE $3::INTEGER END AS NUMERIC) AS anon_1
FROM changed

-- recall the outcome of a command
SELECT processed_command.fingerprint, processed_command.outcome, processed_command.codec, processed_command.result, processed_command.processed_at
FROM processed_command
WHERE processed_command.message_id = $1::VARCHAR COLLATE "C" AND processed_command.handler IN ($2::VARCHAR COLLATE "C")

-- the same, under its former name
SELECT processed_command.fingerprint, processed_command.outcome, processed_command.codec, processed_command.result, processed_command.processed_at
FROM processed_command
WHERE processed_command.message_id = $1::VARCHAR COLLATE "C" AND processed_command.handler IN ($2::VARCHAR COLLATE "C", $3::VARCHAR COLLATE "C") ORDER BY CASE WHEN (processed_command.outcome IS NULL) THEN $4::INTEGER ELSE $5::INTEGER END
 LIMIT $6::INTEGER
