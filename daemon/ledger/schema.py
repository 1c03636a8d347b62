"""The tables of the ledger and the migrations of older files. Migrations are added, never changed."""

import sqlite3
from typing import Final

from mqmk.daemon.errors import LedgerError

MIGRATIONS: Final = (
    """
    CREATE TABLE tasks (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        folder TEXT NOT NULL,             -- under tasks/ in the bucket
        fingerprint TEXT NOT NULL,        -- how that folder looked when this task was found in it
        state TEXT NOT NULL,
        identity TEXT UNIQUE,             -- of the content; NULL until it is known
        reason TEXT,                      -- why it is where it is, for people
        code TEXT,                        -- the same for machines
        manifest BLOB,
        report TEXT,                      -- what validation found, JSON
        approved INTEGER NOT NULL DEFAULT 0,   -- promoted by hand: the gate's verdict is overruled
        attempts INTEGER NOT NULL DEFAULT 0,   -- failures of the present step
        not_before REAL NOT NULL DEFAULT 0,    -- seconds since the epoch; nothing is tried earlier
        split INTEGER NOT NULL DEFAULT 1,      -- parts of a batch, more after running out of memory
        version INTEGER,                  -- of the pool that first held it
        metrics TEXT NOT NULL DEFAULT '{}',
        tidied INTEGER NOT NULL DEFAULT 0,     -- what `bucket.after_learning` asks for is done
        recorded INTEGER NOT NULL DEFAULT 0,   -- its training run is in the registry
        discovered_at REAL NOT NULL,
        updated_at REAL NOT NULL
    );
    CREATE INDEX tasks_by_state ON tasks (state);
    CREATE INDEX tasks_by_name ON tasks (name);
    CREATE TABLE sightings (folder TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, task INTEGER NOT NULL);
    CREATE TABLE events (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        task INTEGER,
        event TEXT NOT NULL,
        state TEXT,                       -- the state after it
        detail TEXT NOT NULL
    );
    CREATE INDEX events_by_task ON events (task);
    CREATE TRIGGER events_are_final BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
    CREATE TRIGGER events_stay BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
    CREATE TABLE versions (
        version INTEGER PRIMARY KEY,
        digest TEXT NOT NULL,
        parent INTEGER,
        kind TEXT NOT NULL,               -- learn or forget
        task INTEGER,
        step TEXT NOT NULL,               -- PLANNED, then PUBLISHED
        evaluation TEXT NOT NULL,
        recorded INTEGER NOT NULL DEFAULT 0,
        created_at REAL NOT NULL
    );
    CREATE TABLE commands (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        subject TEXT NOT NULL,
        state TEXT NOT NULL,              -- PENDING, DONE or REFUSED
        answer TEXT
    );
    CREATE TABLE progress (task INTEGER PRIMARY KEY, detail TEXT NOT NULL, at REAL NOT NULL);
    CREATE TABLE health (part TEXT PRIMARY KEY, up INTEGER NOT NULL, says TEXT NOT NULL, since REAL NOT NULL);
    CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
    """,
    """
    CREATE TABLE tasks_2 (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        folder TEXT NOT NULL,             -- under tasks/ in the bucket
        fingerprint TEXT NOT NULL,        -- how that folder looked when this task was found in it
        state TEXT NOT NULL CHECK (state IN ('DISCOVERED', 'VALIDATED', 'TRAINING', 'TRAINED', 'PUBLISHED', 'SERVING',
            'QUARANTINED', 'CONFLICT', 'HELD', 'FORGOTTEN')),
        attempt INTEGER NOT NULL DEFAULT 1 CHECK (attempt > 0),  -- a result of an earlier attempt is dropped
        identity TEXT UNIQUE,             -- of the content; NULL until it is known
        reason TEXT,                      -- why it is where it is, for people
        code TEXT,                        -- the same for machines
        manifest BLOB,
        report TEXT,                      -- what validation found, JSON
        base TEXT,                        -- what training read besides the task's own data, JSON
        approved INTEGER NOT NULL DEFAULT 0 CHECK (approved IN (0, 1)),  -- promoted: the gate's accuracy is overruled
        failures INTEGER NOT NULL DEFAULT 0 CHECK (failures >= 0),       -- of the present step
        stale INTEGER NOT NULL DEFAULT 0 CHECK (stale >= 0),   -- times it was trained for another g-prompt
        not_before REAL NOT NULL DEFAULT 0,    -- seconds since the epoch; nothing is tried earlier
        split INTEGER NOT NULL DEFAULT 1 CHECK (split > 0),    -- parts of a batch, more after running out of memory
        version INTEGER,                  -- of the pool that first held it
        metrics TEXT NOT NULL DEFAULT '{}',
        tidied INTEGER NOT NULL DEFAULT 0 CHECK (tidied IN (0, 1)),  -- what `bucket.after_learning` asks for is done
        discovered_at REAL NOT NULL,
        updated_at REAL NOT NULL
    ) STRICT;
    INSERT INTO tasks_2 (id, name, folder, fingerprint, state, identity, reason, code, manifest, report, approved,
            failures, not_before, split, version, metrics, tidied, discovered_at, updated_at)
        SELECT id, name, folder, fingerprint, state, identity, reason, code, manifest, report, approved,
            attempts, not_before, split, version, metrics, tidied, discovered_at, updated_at FROM tasks;
    UPDATE tasks_2 SET version = NULL WHERE state = 'FORGOTTEN';
    UPDATE tasks_2 SET state = 'HELD' WHERE state = 'QUARANTINED' AND version IS NOT NULL;  -- a rollback may serve it
    DROP TABLE tasks;
    ALTER TABLE tasks_2 RENAME TO tasks;
    CREATE INDEX tasks_by_state ON tasks (state);
    CREATE INDEX tasks_by_name ON tasks (name);
    CREATE TABLE versions_2 (
        version INTEGER PRIMARY KEY,
        digest TEXT NOT NULL,
        parent INTEGER,
        kind TEXT NOT NULL CHECK (kind IN ('learn', 'forget')),
        task INTEGER REFERENCES tasks (id),
        attempt INTEGER,                  -- the task's when it was built; NULL in versions of release 0.1
        base TEXT,                        -- what the new task's training read besides its own data, JSON
        step TEXT NOT NULL CHECK (step IN ('PLANNED', 'PUBLISHED')),
        evaluation TEXT NOT NULL,
        exact INTEGER CHECK (exact IN (0, 1)),   -- of `forget`: nothing that is left was made from the task's data
        withdrawn INTEGER REFERENCES tasks (id),  -- it holds this task, which was forgotten: never served again
        recorded INTEGER NOT NULL DEFAULT 0 CHECK (recorded IN (0, 1)),
        created_at REAL NOT NULL
    ) STRICT;
    INSERT INTO versions_2 (version, digest, parent, kind, task, step, evaluation, recorded, created_at)
        SELECT version, digest, parent, kind, task, step, evaluation, recorded, created_at FROM versions;
    DROP TABLE versions;
    ALTER TABLE versions_2 RENAME TO versions;
    CREATE TABLE commands_2 (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        subject TEXT NOT NULL,
        task INTEGER,                     -- the one task that is meant, once that is decided
        state TEXT NOT NULL CHECK (state IN ('PENDING', 'DONE', 'REFUSED', 'CANCELLED')),
        answer TEXT
    ) STRICT;
    INSERT INTO commands_2 (id, at, kind, subject, state, answer) SELECT id, at, kind, subject, state, answer
        FROM commands;
    DROP TABLE commands;
    ALTER TABLE commands_2 RENAME TO commands;
    """,
    """
    ALTER TABLE versions ADD COLUMN former_digest TEXT;  -- of the same version in the store of release 0.1
    ALTER TABLE tasks ADD COLUMN erased TEXT NOT NULL DEFAULT '[]';  -- FORGOTTEN: where else its layers were deleted
    """,
    """
    -- Large columns become the last ones: a row is read up to the last column that is asked for.
    ALTER TABLE tasks RENAME COLUMN manifest TO manifest_3;
    ALTER TABLE tasks RENAME COLUMN report TO report_3;
    ALTER TABLE tasks ADD COLUMN manifest BLOB;
    ALTER TABLE tasks ADD COLUMN report TEXT;         -- what validation found, JSON
    UPDATE tasks SET manifest = manifest_3, report = report_3;
    ALTER TABLE tasks DROP COLUMN manifest_3;
    ALTER TABLE tasks DROP COLUMN report_3;
    ALTER TABLE versions RENAME COLUMN evaluation TO evaluation_3;
    ALTER TABLE versions ADD COLUMN evaluation TEXT NOT NULL DEFAULT '{}';
    UPDATE versions SET evaluation = evaluation_3;
    ALTER TABLE versions DROP COLUMN evaluation_3;

    -- What a pass asks for is found by an index, however many tasks and versions there are.
    DROP INDEX tasks_by_state;
    CREATE INDEX tasks_by_state ON tasks (state, id, not_before);
    CREATE INDEX tasks_to_retry ON tasks (code) WHERE failures > 0;
    CREATE INDEX tasks_to_clean_up ON tasks (state, id) WHERE NOT tidied;
    CREATE INDEX tasks_by_version ON tasks (version);
    CREATE INDEX sightings_to_rescan ON sightings (folder) WHERE fingerprint = '';
    CREATE INDEX sightings_by_task ON sightings (task);
    CREATE INDEX versions_planned ON versions (version) WHERE step = 'PLANNED';
    CREATE INDEX versions_unrecorded ON versions (version) WHERE step = 'PUBLISHED' AND NOT recorded;
    CREATE INDEX versions_withdrawn ON versions (version) WHERE withdrawn IS NOT NULL;
    CREATE INDEX versions_by_parent ON versions (parent);
    CREATE INDEX commands_pending ON commands (id) WHERE state = 'PENDING';

    CREATE TABLE classes (class TEXT NOT NULL, task INTEGER NOT NULL REFERENCES tasks (id), PRIMARY KEY (class, task))
        STRICT, WITHOUT ROWID;  -- of every task with a report, whatever its state
    CREATE INDEX classes_by_task ON classes (task);
    INSERT INTO classes SELECT key, tasks.id FROM tasks, json_each(report, '$.samples');
    CREATE TRIGGER classes_of_new_tasks AFTER INSERT ON tasks BEGIN
        INSERT INTO classes SELECT key, NEW.id FROM json_each(NEW.report, '$.samples');
    END;
    CREATE TRIGGER classes_follow_reports AFTER UPDATE OF report ON tasks BEGIN
        DELETE FROM classes WHERE task = NEW.id;
        INSERT INTO classes SELECT key, NEW.id FROM json_each(NEW.report, '$.samples');
    END;
    """,
    """
    CREATE TABLE version_tasks (          -- the tasks that a version adds, in order, or the one that it leaves out
        version INTEGER NOT NULL REFERENCES versions (version),
        task INTEGER NOT NULL REFERENCES tasks (id),
        attempt INTEGER,                  -- the task's when it was built; NULL in versions of release 0.1
        base TEXT,                        -- what the new task's training read besides its own data, JSON
        PRIMARY KEY (version, task)
    ) STRICT;
    INSERT INTO version_tasks SELECT version, task, attempt, base FROM versions WHERE task IS NOT NULL ORDER BY version;
    ALTER TABLE versions DROP COLUMN task;
    ALTER TABLE versions DROP COLUMN attempt;
    ALTER TABLE versions DROP COLUMN base;
    CREATE INDEX version_tasks_by_task ON version_tasks (task);
    """,
    """
    -- Names say what they hold, and the last tables that took any value in any column are STRICT now.
    ALTER TABLE tasks RENAME COLUMN tidied TO cleaned_up;  -- what `bucket.after_learning` asks for is done
    CREATE TABLE folders (                -- of the bucket, that have been acted on
        folder TEXT PRIMARY KEY,
        fingerprint TEXT NOT NULL,        -- how it looked then; '' if it is to be scanned again
        task INTEGER NOT NULL
    ) STRICT;
    INSERT INTO folders (folder, fingerprint, task) SELECT folder, fingerprint, task FROM sightings;
    DROP TABLE sightings;
    CREATE INDEX folders_to_rescan ON folders (folder) WHERE fingerprint = '';
    CREATE INDEX folders_by_task ON folders (task);
    CREATE TABLE events_6 (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        task INTEGER,
        event TEXT NOT NULL,
        state TEXT,                       -- the state after it
        detail TEXT NOT NULL              -- JSON
    ) STRICT;
    INSERT INTO events_6 (number, at, task, event, state, detail)
        SELECT number, at, task, event, state, detail FROM events ORDER BY number;
    DROP TABLE events;
    ALTER TABLE events_6 RENAME TO events;
    CREATE INDEX events_by_task ON events (task);
    CREATE TRIGGER events_are_final BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
    CREATE TRIGGER events_stay BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
    CREATE TABLE progress_6 (task INTEGER PRIMARY KEY, detail TEXT NOT NULL, at REAL NOT NULL) STRICT;
    INSERT INTO progress_6 (task, detail, at) SELECT task, detail, at FROM progress;
    DROP TABLE progress;
    ALTER TABLE progress_6 RENAME TO progress;
    CREATE TABLE health_6 (
        dependency TEXT PRIMARY KEY,
        up INTEGER NOT NULL CHECK (up IN (0, 1)),
        message TEXT NOT NULL,
        since REAL NOT NULL
    ) STRICT;
    INSERT INTO health_6 (dependency, up, message, since) SELECT part, up, says, since FROM health;
    DROP TABLE health;
    ALTER TABLE health_6 RENAME TO health;
    CREATE TABLE key_values (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
    INSERT INTO key_values (name, value) SELECT name, value FROM facts;
    DROP TABLE facts;
    """,
)


def migrate(db: sqlite3.Connection) -> None:
    """Apply the missing migrations, one transaction each; a file of a newer release is refused, not reset."""
    found = _schema_version(db)
    if found > len(MIGRATIONS):
        raise LedgerError(
            f"the ledger has schema {found}, this release supports up to {len(MIGRATIONS)}: upgrade mqmk-daemon, or "
            "restore the backup made before the upgrade"
        )
    for number in range(found, len(MIGRATIONS)):
        try:
            db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")
        except sqlite3.OperationalError:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if _schema_version(db) <= number:  # else another process migrated it at the same moment
                raise


def _schema_version(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])
