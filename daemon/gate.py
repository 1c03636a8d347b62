"""Is a new version fit to be served? The new task is good enough, the old ones are untouched, and it works.

Each check returns the reason for a no, in words for the operator, or None.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mqmk.daemon.config import Config, Gate
from mqmk.daemon.fresh_answer import FreshAnswers
from mqmk.learner.settings import TrainSettings
from mqmk.matcher import golden
from mqmk.matcher.errors import PoolError
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT


@dataclass(frozen=True, eq=False)
class Judged:
    """A version before the gate."""

    old: PromptPool
    new: PromptPool
    document: Mapping[str, Any]
    candidate: Path
    approved: bool
    """An operator wants it whatever its accuracy; that it works is checked all the same."""


def verdict(vit: FrozenViT, config: Config, judged: Judged, fresh: FreshAnswers) -> str | None:
    """The first reason against the new version."""
    return (
        _new_task(config.gate, judged)
        or _old_tasks(vit, config.train, judged)
        or (fresh.fault(judged.candidate, asdict(config.backbone)) if config.gate.fresh_process else None)
    )


def _new_task(gate: Gate, judged: Judged) -> str | None:
    if judged.approved or len(judged.new.tasks) <= len(judged.old.tasks):  # forgetting brings no new task
        return None
    name = judged.new.tasks[-1].name
    measured = judged.document["tasks"].get(name)
    if measured is None:
        if gate.without_held_out == "promote":
            return None
        return (
            f"{name} has no held-out pictures to be judged by; look at it and `mqmk-daemon promote {name}`, or set "
            "gate.without_held_out: promote"
        )
    reached, floor = measured["accuracy_given_task"], gate.accuracy_floor
    if reached >= floor:
        return None
    return f"{name} reaches {reached:.1%} on its own held-out pictures, below gate.accuracy_floor {floor:.1%}"


def _old_tasks(vit: FrozenViT, train: TrainSettings, judged: Judged) -> str | None:
    """The same replay that every replica makes before it swaps."""
    old, new = judged.old.to(vit.device), judged.new.to(vit.device)
    if not old.tasks or not new.tasks or train.g_prompt == "always":  # which changes them all, as the operator chose
        return None
    if not torch.equal(old.g_prompt, new.g_prompt):
        return "the g-prompt changed, and with it every query of old tasks"
    try:
        golden.compare(old, golden.record(vit, old), new, golden.record(vit, new))
    except PoolError as error:
        return str(error)
    return None
