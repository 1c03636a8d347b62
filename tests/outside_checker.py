"""Is anything lost, doubled or out of step? Reads bucket, ledger, pools and MLflow by itself, with none of our code."""

import hashlib
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from safetensors import safe_open

IN_POOL = ("PUBLISHED", "SERVING")
AT_REST = (*IN_POOL, "QUARANTINED", "CONFLICT", "HELD", "FORGOTTEN")


def problems(state: Path, bucket: Path, mlflow: Path | None = None, keep: int | None = None) -> list[str]:
    """Sentences about what is wrong; none if everything is as it must be when the daemon has nothing to do.

    With `keep` the store has the newest so many versions, and the current one.
    """
    with closing(sqlite3.connect(state / "ledger.sqlite")) as db:
        db.row_factory = sqlite3.Row
        tasks = [dict(row) for row in db.execute("SELECT * FROM tasks")]
        versions = [dict(row) for row in db.execute("SELECT * FROM versions ORDER BY version")]
        anew = {row[0] for row in db.execute("SELECT task FROM events WHERE event IN ('task.stale', 'task.retried')")}
        pending = db.execute("SELECT count(*) FROM commands WHERE state = 'PENDING'").fetchone()[0]
    kept = pools(state / "pools")
    found = [f"{pending} commands were not acted on"] if pending else []
    found += _tasks(tasks, bucket) + _versions(versions, kept, state, keep) + _served(tasks, kept, state)
    found += _trained_once(kept, {task["identity"] for task in tasks if task["id"] in anew})
    return found + (_mlflow(mlflow, versions, state) if mlflow else [])


def pools(folder: Path) -> dict[int, dict[str, Any]]:
    """Version -> card, with the hash of every task's tensors."""
    found: dict[int, dict[str, Any]] = {}
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            card = json.loads((path / "pool.json").read_text())
            data = (path / "pool.safetensors").read_bytes()
            assert hashlib.sha256(data).hexdigest() == card["tensors_sha256"], f"{path.name}: damaged"
            assert path.name == f"{card['version']}-{card['digest'][:12]}", f"{path.name}: not its own name"
            assert card["version"] not in found, f"two folders of version {card['version']}"
            found[card["version"]] = card | {"prompts": _prompts(path / "pool.safetensors", card)}
    return found


def _prompts(path: Path, card: dict[str, Any]) -> dict[str, str]:
    with safe_open(path, "numpy") as file:
        names = sorted(file.keys())
        hashes = {name: hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest() for name in names}
    own = {}
    for number, task in enumerate(card["tasks"]):
        own[task["name"]] = "".join(value for name, value in hashes.items() if name.startswith(f"tasks.{number}."))
    return own | {"": hashes["g_prompt"]}


def _tasks(tasks: list[dict[str, Any]], bucket: Path) -> list[str]:
    found = [f"{task['name']} is still {task['state']}" for task in tasks if task["state"] not in AT_REST]
    identities = Counter(task["identity"] for task in tasks if task["identity"])
    found += [f"the content {identity} has {n} rows" for identity, n in identities.items() if n > 1]
    known = {task["folder"] for task in tasks}
    there = [path.parent.name for path in (bucket / "tasks").glob("*/TASK.json")]
    return found + [f"{name} is in the bucket and was never seen" for name in there if name not in known]


def _versions(
    versions: list[dict[str, Any]], pools: dict[int, dict[str, Any]], state: Path, keep: int | None
) -> list[str]:
    numbers = [row["version"] for row in versions]
    found = [] if numbers == [*range(1, len(numbers) + 1)] else [f"versions have gaps: {numbers}"]
    found += [f"version {row['version']} is {row['step']}" for row in versions if row["step"] != "PUBLISHED"]
    current = json.loads((state / "pools" / "CURRENT").read_text())["version"] if keep else None
    if pools.keys() != {*numbers[-(keep or 0) :]} | ({current} if keep else set()):
        found.append(f"the ledger has versions {numbers}, the store {sorted(pools)}")
    for row in versions:
        card = pools.get(row["version"], {})
        if card and (card["digest"], card["parent"]) != (row["digest"], row["parent"]):
            found.append(f"version {row['version']}: ledger and store disagree")
        parent = pools.get(row["parent"] or 0)
        if card and parent and parent["tasks"]:
            kept = parent["prompts"].keys() & card["prompts"].keys()
            found += [f"version {row['version']} changed task {name!r}" for name in kept
                      if parent["prompts"][name] != card["prompts"][name]]  # fmt: skip
    left = [path.name for path in (state / "pools").glob(".*")] if (state / "pools").exists() else []
    return found + [f"left in the store: {name}" for name in left]


def _trained_once(pools: dict[int, dict[str, Any]], anew: set[str]) -> list[str]:
    """The same content has the same prompt in every version that holds it, unless it was learned anew on purpose."""
    prompts: dict[str, set[str]] = {}
    for card in pools.values():
        for task in card["tasks"]:
            prompts.setdefault(task["manifest_sha256"], set()).add(card["prompts"][task["name"]])
    twice = {identity: len(own) for identity, own in prompts.items() if len(own) > 1 and identity not in anew}
    return [f"{identity} has {n} prompts" for identity, n in twice.items()]


def _served(tasks: list[dict[str, Any]], pools: dict[int, dict[str, Any]], state: Path) -> list[str]:
    pointer = state / "pools" / "CURRENT"
    if not pointer.exists():
        return [
            f"{task['name']} is {task['state']} and nothing is current" for task in tasks if task["state"] in IN_POOL
        ]
    current = json.loads(pointer.read_text())
    card = pools[current["version"]]
    found = [] if card["digest"] == current["digest"] else ["CURRENT names a digest that its version does not have"]
    names = Counter(task["name"] for task in card["tasks"])
    expected = Counter(task["name"] for task in tasks if task["state"] in IN_POOL)
    if names != expected:
        found.append(f"the current pool has {dict(names - expected)} too much and lacks {dict(expected - names)}")
    identities = {task["name"]: task["manifest_sha256"] for task in card["tasks"]}
    return found + [
        f"{task['name']} is served from other content"
        for task in tasks
        if task["state"] in IN_POOL and identities.get(task["name"]) != task["identity"]
    ]


def _mlflow(database: Path, versions: list[dict[str, Any]], state: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as db:
        rows = db.execute("SELECT version FROM model_versions ORDER BY version").fetchall()
        tags = dict(db.execute("SELECT version, value FROM model_version_tags WHERE key = 'digest'").fetchall())
        aliases = dict(db.execute("SELECT alias, version FROM registered_model_aliases").fetchall())
        effects = db.execute(
            "SELECT t.value FROM tags t JOIN runs r ON r.run_uuid = t.run_uuid "
            "WHERE t.key LIKE '%effect_id' AND r.lifecycle_stage = 'active'"
        ).fetchall()
    found = []
    if [row[0] for row in rows] != [row["version"] for row in versions]:
        found.append(f"MLflow has versions {[row[0] for row in rows]}, the ledger {len(versions)}")
    found += [f"MLflow has another digest for version {row['version']}" for row in versions
              if tags.get(row["version"]) != row["digest"]]  # fmt: skip
    found += [f"MLflow has {n} runs for {effect}" for (effect,), n in Counter(effects).items() if n > 1]
    pointer = state / "pools" / "CURRENT"
    if pointer.exists() and aliases.get("serving") != json.loads(pointer.read_text())["version"]:
        found.append(f"MLflow's alias is {aliases}, CURRENT is {pointer.read_text().strip()}")
    return found
