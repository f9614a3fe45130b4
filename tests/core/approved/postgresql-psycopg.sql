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
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT %(message_id)s::VARCHAR AS anon_1, %(handler)s::VARCHAR AS anon_2, %(occurred_at)s::TIMESTAMP WITH TIME ZONE AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with claim_timeout
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT %(message_id)s::VARCHAR AS anon_1, %(handler)s::VARCHAR AS anon_2, %(occurred_at)s::TIMESTAMP WITH TIME ZONE AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby, set_config(%(set_config_1)s::VARCHAR, concat(%(wait_ms)s::VARCHAR, %(concat_1)s::VARCHAR), %(set_config_2)s) AS wait
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with a former name
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT %(message_id)s::VARCHAR AS anon_1, %(handler_0)s::VARCHAR AS anon_2, CAST(%(occurred_at)s::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before UNION ALL SELECT %(message_id)s::VARCHAR AS anon_4, %(handler_1)s::VARCHAR AS anon_5, CAST(%(occurred_at)s::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING RETURNING processed_message.handler

-- claim, with both
INSERT INTO processed_message (message_id, handler, occurred_at) SELECT %(message_id)s::VARCHAR AS anon_1, %(handler_0)s::VARCHAR AS anon_2, CAST(%(occurred_at)s::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby, set_config(%(set_config_1)s::VARCHAR, concat(%(wait_ms)s::VARCHAR, %(concat_1)s::VARCHAR), %(set_config_2)s) AS wait
 LIMIT ALL OFFSET 0) AS before UNION ALL SELECT %(message_id)s::VARCHAR AS anon_4, %(handler_1)s::VARCHAR AS anon_5, CAST(%(occurred_at)s::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby, set_config(%(set_config_1)s::VARCHAR, concat(%(wait_ms)s::VARCHAR, %(concat_1)s::VARCHAR), %(set_config_2)s) AS wait
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING RETURNING processed_message.handler

-- claim, with a digest
INSERT INTO processed_message (message_id, handler, occurred_at, digest) SELECT %(message_id)s::VARCHAR AS anon_1, %(handler)s::VARCHAR AS anon_2, %(occurred_at)s::TIMESTAMP WITH TIME ZONE AS anon_3, %(digest)s AS anon_4
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING

-- claim, with a digest and a former name
INSERT INTO processed_message (message_id, handler, occurred_at, digest) SELECT %(message_id)s::VARCHAR AS anon_1, %(handler_0)s::VARCHAR AS anon_2, CAST(%(occurred_at)s::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3, CAST(%(digest)s AS BYTEA) AS anon_4
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before UNION ALL SELECT %(message_id)s::VARCHAR AS anon_5, %(handler_1)s::VARCHAR AS anon_6, CAST(%(occurred_at)s::TIMESTAMP WITH TIME ZONE AS TIMESTAMP WITH TIME ZONE) AS anon_3, CAST(%(digest)s AS BYTEA) AS anon_4
FROM (SELECT CASE WHEN current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local') THEN pg_logical_emit_message(true, 'projector_dedup', '') END AS standby
 LIMIT ALL OFFSET 0) AS before ON CONFLICT (message_id, handler) DO NOTHING RETURNING processed_message.handler

-- is the marker there? (for the text of an error)
SELECT 1
FROM processed_message
WHERE processed_message.message_id = %(message_id)s::VARCHAR COLLATE "C" AND processed_message.handler = %(handler)s::VARCHAR COLLATE "C"

-- has the duplicate another body?
SELECT processed_message.digest
FROM processed_message
WHERE processed_message.message_id = %(message_id)s::VARCHAR COLLATE "C" AND processed_message.handler IN (%(handler)s::VARCHAR COLLATE "C") AND processed_message.digest != %(digest)s
 LIMIT %(param_1)s::INTEGER

-- prune one batch
DELETE FROM processed_message WHERE (SELECT concat(set_config('lock_timeout', '100ms', true), set_config('synchronous_commit', 'off', true))) IS NOT NULL AND ctid = any(array((SELECT ctid
FROM processed_message
WHERE processed_message.processed_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE) ORDER BY processed_message.processed_at
 LIMIT %(batch_size)s::INTEGER FOR UPDATE SKIP LOCKED))) AND processed_message.processed_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE)

-- prune one batch of a handler
DELETE FROM processed_message WHERE (SELECT concat(set_config('lock_timeout', '100ms', true), set_config('synchronous_commit', 'off', true))) IS NOT NULL AND ctid = any(array((SELECT ctid
FROM processed_message
WHERE processed_message.processed_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE) AND processed_message.handler = %(handler)s::VARCHAR COLLATE "C" ORDER BY processed_message.processed_at
 LIMIT %(batch_size)s::INTEGER FOR UPDATE SKIP LOCKED))) AND processed_message.processed_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE) AND processed_message.handler = %(handler)s::VARCHAR COLLATE "C"

-- is anything left to prune?
SELECT 1
FROM processed_message
WHERE processed_message.processed_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE AND (processed_message.occurred_at IS NULL OR processed_message.occurred_at < %(cutoff)s::TIMESTAMP WITH TIME ZONE)
 LIMIT %(param_1)s::INTEGER

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
(UPDATE processed_command SET fingerprint=%(the_fingerprint)s, outcome=%(the_outcome)s::SMALLINT, codec=%(the_codec)s::VARCHAR COLLATE "C", result=%(the_result)s WHERE processed_command.message_id = %(stored)s::VARCHAR COLLATE "C" AND processed_command.handler IN (%(name_0)s::VARCHAR COLLATE "C") AND processed_command.outcome IS NULL RETURNING 1)
 SELECT count(*) / CAST(CASE WHEN (count(*) = %(count_1)s::INTEGER) THEN %(param_1)s::INTEGER ELSE %(param_2)s::INTEGER END AS NUMERIC) AS anon_1
FROM changed

-- the same, with a former name
WITH changed AS
(UPDATE processed_command SET fingerprint=%(the_fingerprint)s, outcome=%(the_outcome)s::SMALLINT, codec=%(the_codec)s::VARCHAR COLLATE "C", result=%(the_result)s WHERE processed_command.message_id = %(stored)s::VARCHAR COLLATE "C" AND processed_command.handler IN (%(name_0)s::VARCHAR COLLATE "C", %(name_1)s::VARCHAR COLLATE "C") AND processed_command.outcome IS NULL RETURNING 1)
 SELECT count(*) / CAST(CASE WHEN (count(*) = %(count_1)s::INTEGER) THEN %(param_1)s::INTEGER ELSE %(param_2)s::INTEGER END AS NUMERIC) AS anon_1
FROM changed

-- recall the outcome of a command
SELECT processed_command.fingerprint, processed_command.outcome, processed_command.codec, processed_command.result, processed_command.processed_at
FROM processed_command
WHERE processed_command.message_id = %(stored)s::VARCHAR COLLATE "C" AND processed_command.handler IN (%(name_0)s::VARCHAR COLLATE "C")

-- the same, under its former name
SELECT processed_command.fingerprint, processed_command.outcome, processed_command.codec, processed_command.result, processed_command.processed_at
FROM processed_command
WHERE processed_command.message_id = %(stored)s::VARCHAR COLLATE "C" AND processed_command.handler IN (%(name_0)s::VARCHAR COLLATE "C", %(name_1)s::VARCHAR COLLATE "C") ORDER BY CASE WHEN (processed_command.outcome IS NULL) THEN %(param_1)s::INTEGER ELSE %(param_2)s::INTEGER END
 LIMIT %(param_3)s::INTEGER
