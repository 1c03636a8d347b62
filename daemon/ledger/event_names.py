"""Events that release 0.1 stored under other names. Events are append-only, so readers translate."""

from collections.abc import Mapping
from typing import Final

RENAMED: Final[Mapping[str, str]] = {
    "task.will-retry": "task.retry_scheduled",
    "task.seen-again": "task.duplicate_found",
    "task.same-content": "task.duplicate_rejected",
    "task.not-tidied": "task.cleanup_skipped",
    "task.tidied": "task.cleaned_up",
    "task.stale": "task.retraining_scheduled",
    "task.training": "task.training_started",
    "task.epoch": "task.epoch_finished",
    "task.serving": "task.rolled_out",
}


def current_name(event: str) -> str:
    """What an event that was stored under this name is called now."""
    return RENAMED.get(event, event)
