"""Is anything lost, duplicated or inconsistent? Reads bucket, ledger, pools and MLflow without any of our code."""

import hashlib
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

IN_POOL = ("PUBLISHED", "SERVING")
AT_REST = (*IN_POOL, "QUARANTINED", "CONFLICT", "HELD", "FORGOTTEN")


def problems(state: Path, bucket: Path, mlflow: Path | None = None, keep: int | None = None) -> list[str]:
    """Sentences about what is wrong; none if the state is consistent while the daemon is idle.

    With `keep`, the store has the newest `keep` versions and the current one.
    """
    with closing(sqlite3.connect(state / "ledger.sqlite")) as db:
        db.row_factory = sqlite3.Row
        tasks = [dict(row) for row in db.execute("SELECT * FROM tasks")]
        versions = [dict(row) for row in db.execute("SELECT * FROM versions ORDER BY version")]
        retrained = {
            row[0]
            for row in db.execute(
                "SELECT task FROM events WHERE event IN "
                "('task.retraining_scheduled', 'task.stale', 'task.retried', 'task.approved')"
            )
        }
        pending = db.execute("SELECT count(*) FROM commands WHERE state = 'PENDING'").fetchone()[0]
    kept = pools(state / "pools")
    found = [f"{pending} commands were not acted on"] if pending else []
    found += _tasks(tasks, bucket) + _versions(versions, kept, state, keep) + _served(tasks, kept, state)
    found += _forgotten(tasks, kept, state) + _unnamed_layers(state, kept)
    found += _trained_once(kept, {task["identity"] for task in tasks if task["id"] in retrained})
    return found + (_mlflow(mlflow, versions, state) if mlflow else [])


def pools(folder: Path) -> dict[int, dict[str, Any]]:
    """Version -> card, with the tasks of its pages and the hash of every task's layer; every file is checked."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted((folder / "versions").glob("*.json")):
        data = path.read_bytes()
        card, digest = json.loads(data), hashlib.sha256(data).hexdigest()
        assert path.name == f"{card['version']}-{digest[:12]}.json", f"{path.name}: damaged, or not its own name"
        assert card["version"] not in found, f"two cards of version {card['version']}"
        pages = [json.loads(_read_layer(folder, f"{page}.json")) for page in card["pages"]]
        tasks = [task for page in (*pages, card["tasks"]) for task in page]
        statistics = [task["statistics"] for task in tasks if task["statistics"]]
        for name in (card["g"], *(task["layer"] for task in tasks), *statistics):
            _read_layer(folder, f"{name}.safetensors")
        prompts = {task["name"]: task["layer"] for task in tasks} | {"": card["g"]}
        found[card["version"]] = card | {"digest": digest, "tasks": tasks, "prompts": prompts, "statistics": statistics}
    return found


def _read_layer(folder: Path, name: str) -> bytes:
    data = (folder / "layers" / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == name.partition(".")[0], f"layers/{name}: damaged"
    return data


def _unnamed_layers(state: Path, cards: dict[int, dict[str, Any]]) -> list[str]:
    """Layers that no version names, and no candidate that the gate held."""
    held = "".join(path.read_text() for path in state.glob("candidates/*.json"))
    named = {f"{page}.json" for card in cards.values() for page in card["pages"]}
    for card in cards.values():
        named |= {f"{layer}.safetensors" for layer in (*card["prompts"].values(), *card["statistics"])}
    there = {path.name for path in (state / "pools" / "layers").glob("*")}
    left = sorted(name for name in there - named if name.partition(".")[0] not in held)
    return [f"layers/{name} belongs to no version" for name in left]


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
    withdrawn = {row["version"] for row in versions if row["withdrawn"] is not None}
    left = [number for number in numbers if number not in withdrawn]  # `keep` counts those that can be served
    needed, allowed = ({*numbers[-(keep or 0) :]} - withdrawn), {*left[-(keep or 0) :]}
    own = {current} if keep else set()
    if not needed | own <= pools.keys() <= allowed | own:
        found.append(f"the ledger has versions {numbers}, {sorted(withdrawn)} withdrawn, the store {sorted(pools)}")
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


def _trained_once(pools: dict[int, dict[str, Any]], retrained: set[str]) -> list[str]:
    """The same content has the same prompt in every version that contains it, unless it was retrained on purpose."""
    prompts: dict[str, set[str]] = {}
    for card in pools.values():
        for task in card["tasks"]:
            prompts.setdefault(task["manifest_sha256"], set()).add(card["prompts"][task["name"]])
    twice = {identity: len(own) for identity, own in prompts.items() if len(own) > 1 and identity not in retrained}
    return [f"{identity} has {n} prompts" for identity, n in twice.items()]


def _forgotten(tasks: list[dict[str, Any]], pools: dict[int, dict[str, Any]], state: Path) -> list[str]:
    """Nothing is left of a forgotten task: no version in the store, no candidate, no work, no held-out images."""
    found = []
    for name, identity in ((task["name"], task["identity"]) for task in tasks if task["state"] == "FORGOTTEN"):
        held = [
            number for number, card in pools.items() if identity in [each["manifest_sha256"] for each in card["tasks"]]
        ]
        found += [f"{name} is forgotten and in versions {held}"] if held else []
        left = [state / "held-out" / f"{identity}.safetensors", state / "work" / str(identity)]
        left += [path for path in state.glob("candidates/*.json") if str(identity) in path.read_text()]
        found += [f"{name} is forgotten and {path} is left" for path in left if path.exists()]
    return found


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
              if tags.get(row["version"]) not in (row["digest"], row["former_digest"] or row["digest"])]  # fmt: skip
    found += [f"MLflow has {n} runs for {effect}" for (effect,), n in Counter(effects).items() if n > 1]
    pointer = state / "pools" / "CURRENT"
    if pointer.exists() and aliases.get("serving") != json.loads(pointer.read_text())["version"]:
        found.append(f"MLflow's alias is {aliases}, CURRENT is {pointer.read_text().strip()}")
    return found
