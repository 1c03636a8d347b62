"""The gate: may a new version be served? New tasks are accurate enough, old ones are unchanged, and it works.

Each check returns the reason against a task or against the version, for the operator, or None.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mqmk.daemon.builder.smoke_test import SmokeTest
from mqmk.daemon.config.sections import Config, Gate
from mqmk.daemon.words import command
from mqmk.matcher import golden
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.prompted_vit import FrozenViT


@dataclass(frozen=True, eq=False)
class Candidate:
    """A version before the gate."""

    old: PromptPool
    new: PromptPool
    store: PoolStore
    card: Path
    """The version's card, which is not in the store yet; its layers are."""


def check_version(vit: FrozenViT, config: Config, candidate: Candidate, smoke_test: SmokeTest) -> str | None:
    """The first reason against the new version, whichever task it may be due to."""
    return _check_old_tasks(vit, candidate) or (
        _check_answers(config, candidate, smoke_test) if config.gate.fresh_process else None
    )


def _check_answers(config: Config, candidate: Candidate, smoke_test: SmokeTest) -> str | None:
    return smoke_test.find_error(candidate.store.folder, candidate.card, asdict(config.backbone))


def check_new_task(gate: Gate, name: str, measured: Mapping[str, Any] | None) -> str | None:
    """The reason against a new task; its figures are None without held-out images."""
    if measured is None:
        if gate.without_held_out == "promote":
            return None
        return (
            f"{name} has no held-out images to evaluate it on; {command('promote', name)} serves it anyway, or set "
            "gate.without_held_out: promote"
        )
    accuracy, floor = measured["accuracy_given_task"], gate.accuracy_floor
    if accuracy >= floor:
        return None
    return f"{name} reaches {accuracy:.1%} on its own held-out images, below gate.accuracy_floor {floor:.1%}"


def _check_old_tasks(vit: FrozenViT, candidate: Candidate) -> str | None:
    """The same golden replay that every replica runs before it swaps."""
    old, new = candidate.old.to(vit.device), candidate.new.to(vit.device)
    if not old.tasks or not new.tasks:
        return None
    if not torch.equal(old.g_prompt, new.g_prompt):
        return "the g-prompt changed, and with it every query of old tasks"
    try:
        golden.compare(old, golden.record(vit, old), new, golden.record(vit, new))
    except PoolError as error:
        return str(error)
    return None
