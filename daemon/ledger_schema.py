"""The tables of the ledger and how an older file becomes a current one. A migration is added, never changed."""

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
)


def migrate(db: sqlite3.Connection) -> None:
    """Bring the file up to date, one transaction for each migration; a file of the future is refused, not reset."""
    found = _schema(db)
    if found > len(MIGRATIONS):
        raise LedgerError(
            f"the ledger has schema {found}, this program knows {len(MIGRATIONS)}: upgrade mqmk-daemon, or restore the "
            "backup made before the upgrade"
        )
    for number in range(found, len(MIGRATIONS)):
        try:
            db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")
        except sqlite3.OperationalError:
            if db.in_transaction:
                db.execute("ROLLBACK")
            if _schema(db) <= number:  # else somebody who opened it at the same moment was first
                raise


def _schema(db: sqlite3.Connection) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])
