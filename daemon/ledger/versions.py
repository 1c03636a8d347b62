"""Rows of pool versions: announced, published, withdrawn; what each contains; moving CURRENT to another version."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from mqmk.daemon.errors import LedgerError, OutdatedError
from mqmk.daemon.ledger.database import insert, to_sql
from mqmk.daemon.ledger.rows import IN_POOL, State, TaskRow, VersionRow, VersionTask
from mqmk.daemon.ledger.tasks import TaskLedger

MOVING: Final = "moving_to"  # the version that CURRENT is being moved to
_IS_MADE_FROM: Final = "EXISTS (SELECT 1 FROM json_each(base, '$.made_from') WHERE value = ?2)"
_LEFT_TASKS: Final = f"SELECT 1 FROM tasks WHERE id != ?1 AND state != 'FORGOTTEN' AND {_IS_MADE_FROM} LIMIT 1"
"""Another task that was made from the data of the task. The bases of release 0.1 are unknown."""
_LEARNED: Final = "version_tasks JOIN versions USING (version) WHERE kind = 'learn'"
_SUSPECTS: Final = f"""SELECT version, task FROM {_LEARNED} AND task != ?1
    AND task NOT IN (SELECT id FROM tasks WHERE state = 'FORGOTTEN')  -- its versions are withdrawn
    AND iif(base IS NULL, version > (SELECT min(version) FROM {_LEARNED} AND task = ?1), {_IS_MADE_FROM})"""
"""Versions that added a task made from the data of the task, perhaps in an earlier life of that task."""


class VersionLedger(TaskLedger):
    """The tables `versions` and `version_tasks`."""

    def versions(self) -> list[VersionRow]:
        """Every version, in order."""
        return self._versions("TRUE")

    def summarized_versions(self) -> list[VersionRow]:
        """Every version, without what its evaluation says about single tasks, unless its figures follow from that."""
        row = ", ".join(field.name for field in fields(VersionRow) if field.name not in ("evaluation", "tasks"))
        figures = """iif(json_type(evaluation, '$.images') IS NULL, evaluation,
            json_remove(evaluation, '$.tasks', '$.confusion', '$.classes', '$.mistaken_classes')) AS evaluation"""
        return self._versions("TRUE", columns=f"{row}, {figures}")

    def figures_when_learned(self) -> dict[int, Mapping[str, float]]:
        """Task -> its figures in the version that first contained it, if it is in the pool and they were measured."""
        sql = f"""SELECT tasks.id, value AS metrics FROM tasks JOIN versions USING (version)
            JOIN json_each(evaluation, '$.tasks') ON key = name WHERE state IN ({", ".join("?" * len(IN_POOL))})"""
        return {row["id"]: row["metrics"] for row in self._rows(sql, *IN_POOL)}

    def version(self, number: int) -> VersionRow:
        """One version."""
        found = self._versions("version = ?", number)
        if not found:
            raise LedgerError(f"there is no version {number}; `mqmk-daemon versions` lists them")
        return found[0]

    def _versions(self, where: str, *values: Any, columns: str = "*") -> list[VersionRow]:
        tasks: dict[int, list[VersionTask]] = {}
        which = f"version IN (SELECT version FROM versions WHERE {where})"
        for row in self._rows(f"SELECT * FROM version_tasks WHERE {which} ORDER BY rowid", *values):
            tasks.setdefault(row["version"], []).append(VersionTask(row["task"], row["attempt"], row["base"]))
        found = self._rows(f"SELECT {columns} FROM versions WHERE {where} ORDER BY version", *values)
        return [VersionRow(**row, tasks=tuple(tasks.get(row["version"], ()))) for row in found]

    def has_version(self, number: int) -> bool:
        """Whether there is such a version."""
        return bool(self._rows("SELECT 1 FROM versions WHERE version = ?", number))

    def next_version(self) -> int:
        """The number after the highest."""
        return int(self._rows("SELECT coalesce(max(version), 0) + 1 AS n FROM versions")[0]["n"])

    def unfinished_versions(self) -> list[VersionRow]:
        """Announced but not published."""
        return self._versions("step = 'PLANNED'")

    def unrecorded_versions(self) -> list[VersionRow]:
        """Published, but not in the registry yet."""
        return self._versions("step = 'PUBLISHED' AND NOT recorded")

    # Publishing

    def plan_version(self, version: int, digest: str, parent: int | None, kind: str, tasks: Sequence[TaskRow],
                     evaluation: Mapping[str, Any]) -> VersionRow:  # fmt: skip
        """Announce a version before any of its files is in the store: after a kill, the next start finishes it.

        OutdatedError if one of the tasks that it adds or leaves out has moved on since it was read.
        """
        values = {"version": version, "digest": digest, "parent": parent, "kind": kind, "step": "PLANNED",
                  "evaluation": evaluation, "created_at": self._clock()}  # fmt: skip
        with self._transaction() as db:
            insert(db, "versions", values)
            for task in tasks:
                now = self.task(task.id)
                if (now.state, now.attempt) != (task.state, task.attempt):
                    raise OutdatedError(f"task {task.name} is no longer {task.state} in attempt {task.attempt}")
                own = {"task": task.id, "attempt": task.attempt, "base": task.base if kind == "learn" else None}
                insert(db, "version_tasks", {"version": version} | own)
                self._append(db, task.id, "version.planned", None, {"version": version, "digest": digest, "kind": kind})
        return self.version(version)

    def finish_version(self, version: VersionRow, metrics: Mapping[int, Mapping[str, Any]], *,
                       exact: bool | None = None, answer: str | None = None) -> None:  # fmt: skip
        """Mark a version and its tasks as published or forgotten, in one transaction, once CURRENT names it."""
        if version.kind == "learn":
            to, event = State.PUBLISHED, "task.published"
            changes: dict[str, Any] = {"version": version.version}
        else:
            cleared = {"reason": None, "code": None, "failures": 0, "not_before": 0.0}  # of a task called so before
            to, event, changes = State.FORGOTTEN, "task.forgotten", {"version": None, "erased": []} | cleared
        detail = {"version": version.version, "exact": exact, "answer": answer}
        with self._transaction() as db:
            db.execute("UPDATE versions SET step = 'PUBLISHED', exact = ? WHERE version = ?", (exact, version.version))
            for task in [self.task(each.task) for each in version.tasks]:
                self._change(db, task.id, task.state, to, task.attempt, event, detail,
                             changes | {"approved": False, "stale": 0})  # fmt: skip
            for number, values in metrics.items():
                db.execute("UPDATE tasks SET metrics = ? WHERE id = ?", (to_sql(values), number))

    def cancel_version(self, version: VersionRow) -> None:
        """Withdraw an announcement whose files were lost before they were stored; the number is free again."""
        with self._transaction() as db:
            db.execute("DELETE FROM versions WHERE version = ?", (version.version,))
            db.execute("DELETE FROM version_tasks WHERE version = ?", (version.version,))
            for each in version.tasks:
                self._append(db, each.task, "version.cancelled", None, {"version": version.version})

    def mark_recorded(self, version: VersionRow) -> None:
        """Note that the registry has this version."""
        with self._transaction() as db:
            db.execute("UPDATE versions SET recorded = 1 WHERE version = ?", (version.version,))
            self._append(db, None, "version.recorded", None, {"version": version.version})

    def replace_digests(self, digests: Mapping[str, str]) -> None:
        """The store was rewritten: versions with these digests have others now, in one transaction."""
        with self._transaction() as db:
            for old, new in digests.items():
                sql = "UPDATE versions SET digest = ?, former_digest = digest WHERE digest = ?"
                db.execute(sql, (new, old))

    def summarize_evaluations(self, versions: Iterable[int]) -> None:
        """Of versions that are removed, keep the figures over all tasks and those of the tasks that they added."""
        own = """SELECT json_group_object(key, json(value)) FROM json_each(evaluation, '$.tasks')
            WHERE key IN (SELECT name FROM tasks WHERE tasks.version = versions.version
                OR tasks.id IN (SELECT task FROM version_tasks t WHERE t.version = versions.version))"""
        rest = "json_remove(evaluation, '$.confusion', '$.classes', '$.mistaken_classes')"
        sql = f"""UPDATE versions SET evaluation = json_set({rest}, '$.tasks', json(({own})))
            WHERE version = ? AND json_type(evaluation, '$.images') IS NOT NULL"""
        with self._transaction() as db:
            db.executemany(sql, [(version,) for version in versions])

    def is_version(self, number: int, digest: str) -> bool:
        """Whether a version has this digest (its first digits suffice), or had it in a store of release 0.1."""
        found = self._rows("SELECT digest, former_digest FROM versions WHERE version = ?", number)
        return any((value or "").startswith(digest) for row in found for value in row.values())

    # Contents

    def tasks_in_version(self, version: int | None) -> dict[int, int]:
        """The tasks that a version contains, in order, each with the version that added it."""
        sql = """WITH RECURSIVE line(version) AS (
            SELECT version FROM versions WHERE version = ?
            UNION ALL SELECT v.parent FROM versions v JOIN line ON v.version = line.version WHERE v.parent IS NOT NULL
        ) SELECT version, kind, task FROM line JOIN versions USING (version) JOIN version_tasks t USING (version)
            ORDER BY version, t.rowid"""
        contained: dict[int, int] = {}
        for row in self._rows(sql, version):
            contained.pop(row["task"], None)
            if row["kind"] == "learn":
                contained[row["task"]] = row["version"]
        return contained

    def is_exact_without(self, task: TaskRow) -> bool:
        """Whether nothing that is left was made from the task's data: no version that can be served, no other task."""
        if self._rows(_LEFT_TASKS, task.id, task.identity):
            return False
        suspects = {(row["task"], row["version"]) for row in self._rows(_SUSPECTS, task.id, task.identity)}
        if not suspects:
            return True
        suspected, changed = {each for each, _ in suspects}, self._changed_tasks()
        contains = dict[int | None, bool]()
        counts = dict[int | None, int]()  # of tasks that a version contains because a suspect added them
        sql = "SELECT version, parent, kind, withdrawn FROM versions ORDER BY version"
        for version, parent, kind, withdrawn in self._db.execute(sql).fetchall():
            own = changed.get(version, ())
            contains[version] = kind == "learn" if task.id in own else contains.get(parent, False)
            counts[version] = counts.get(parent, 0) + sum((each, version) in suspects for each in own)
            if kind == "forget" and not suspected.isdisjoint(own):
                before = self.tasks_in_version(parent)
                counts[version] -= sum((each, before.get(each)) in suspects for each in own)
            if counts[version] and not contains[version] and withdrawn is None:
                return False
        return True

    def _changed_tasks(self) -> dict[int, list[int]]:
        """Version -> the tasks that it adds or leaves out."""
        found: dict[int, list[int]] = {}
        for row in self._rows("SELECT version, task FROM version_tasks ORDER BY rowid"):
            found.setdefault(row["version"], []).append(row["task"])
        return found

    def withdraw_forgotten(self) -> None:
        """Withdraw every version that contains a forgotten task: release 0.1 did not."""
        forgotten = {row["id"] for row in self._rows("SELECT id FROM tasks WHERE state = 'FORGOTTEN'")}
        changed, contained = self._changed_tasks(), dict[int | None, frozenset[int]]()
        with self._transaction() as db:
            for version, parent, kind in db.execute("SELECT version, parent, kind FROM versions ORDER BY version"):
                own = forgotten.intersection(changed.get(version, ()))
                before = contained.get(parent, frozenset())
                contained[version] = before | own if kind == "learn" else before - own
            numbers = [(min(tasks), version) for version, tasks in contained.items() if tasks]
            db.executemany("UPDATE versions SET withdrawn = ? WHERE version = ? AND withdrawn IS NULL", numbers)

    def withdrawn_versions(self) -> list[int]:
        """Versions that contain a forgotten task."""
        sql = "SELECT version FROM versions WHERE withdrawn IS NOT NULL ORDER BY version"
        return [row["version"] for row in self._rows(sql)]

    def whole_versions_to_erase(self) -> list[int]:
        """Versions with a forgotten task that release 0.1 may have copied elsewhere as a whole."""
        sql = "SELECT version FROM versions WHERE withdrawn IS NOT NULL AND former_digest IS NOT NULL ORDER BY version"
        return [row["version"] for row in self._rows(sql)]

    # Moving CURRENT

    def begin_move(self, version: int) -> None:
        """Announce that CURRENT is about to move: after a kill, the next start finishes it."""
        self.set_value(MOVING, str(version))

    def moving_to(self) -> int | None:
        """The version that CURRENT is being moved to."""
        found = self.get_value(MOVING)
        return int(found) if found else None

    def finish_move(self, version: int, moves: Mapping[int, tuple[State, str | None]]) -> None:
        """Give every affected task its state and reason, in one transaction, once CURRENT names the version."""
        with self._transaction() as db:
            for number, (to, reason) in moves.items():
                task = self.task(number)
                changes = {"reason": reason, "code": "rolled-back" if reason else None, "approved": False}
                event = f"task.{to.lower()}"
                self._change(db, number, task.state, to, task.attempt, event, {"version": version}, changes)
            db.execute("DELETE FROM key_values WHERE name = ?", (MOVING,))
