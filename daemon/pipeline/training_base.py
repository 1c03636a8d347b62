"""What the training of a task reads besides its own data: part of the current pool, and whose data made that."""

from dataclasses import replace
from typing import Any

from mqmk.daemon.ledger.ledger import Ledger, TaskRow
from mqmk.daemon.state_dir import StateDir
from mqmk.matcher.pool_files import PoolFiles, decode, encode


def extract_base(files: StateDir, *, start: str) -> PoolFiles | None:
    """All that training needs of the current pool: the g-prompt, and the prompt that a new one is initialised with.

    None if there is no pool yet, or an empty one.
    """
    current = files.store.current()
    if current is None:
        return None
    card = files.store.card(current)
    if not card.tasks:
        return None
    first = card.tasks[-1:] if start == "previous" else card.tasks[:1]
    return encode(files.store.assemble(replace(card, tasks=first, matching={})), 0, None)[1]


def trace_origin(ledger: Ledger, base: PoolFiles | None) -> dict[str, Any]:
    """Which prompt training is about to read, and the identities of all data that it was made from.

    The g-prompt was made from the first task of its line, and so was every prompt that was initialised with that one.
    """
    if base is None:
        return {"digest": None, "made_from": []}
    version, pool = decode(base)
    found: set[str] = set()
    for prompt in pool.tasks:
        row = ledger.task_with_identity(prompt.manifest_sha256)
        found |= {prompt.manifest_sha256, *_source_identities(ledger, row)}
    return {"digest": version.digest, "made_from": sorted(found)}


def _source_identities(ledger: Ledger, row: TaskRow | None) -> list[str]:
    if row and row.base is not None:
        return list(row.base["made_from"])
    # Learned by release 0.1, which did not store this: assume every task learned before it.
    learned = [(at.version, each.task) for at in ledger.versions() if at.kind == "learn" for each in at.tasks]
    own = min((version for version, task in learned if row and task == row.id), default=0)
    rows = [ledger.task(task) for version, task in learned if version < own]
    return [each.identity for each in rows if each.identity]
