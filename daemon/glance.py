"""Does it match, does it forget? The few figures that `status` shows above its table."""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from mqmk.daemon.metrics_ledger import Evaluated
from mqmk.deploy.reports import ReplicaReport


def glance(evaluated: Evaluated | None, reports: Iterable[ReplicaReport]) -> dict[str, Any]:
    """The held-out and the labelled matching rate, and what was forgotten; None where nothing is known."""
    tasks = evaluated.document.get("tasks", {}) if evaluated else {}
    before = evaluated.when_learned if evaluated else {}
    told = [report.feedback for report in reports]
    matched, mismatched = (sum(each.get(name, 0) for each in told) for name in ("matched", "mismatched"))
    return {
        "heldout": _mean(row["matching_rate"] for row in tasks.values()),
        "labelled": matched / (matched + mismatched) if matched + mismatched else None,
        "labelled_answers": matched + mismatched,
        "forgetting": _mean(before[name] - row["accuracy"] for name, row in tasks.items() if name in before),
    }


def in_words(figures: Mapping[str, Any]) -> str | None:
    """One line; None before anything is known."""
    words = []
    if figures["heldout"] is not None:
        words.append(f"matched rightly: {figures['heldout']:.1%} of held-out pictures")
    if figures["labelled"] is not None:
        words.append(f"{figures['labelled']:.1%} of {figures['labelled_answers']} labelled answers")
    if figures["forgetting"] is not None:
        words.append(f"forgotten: {max(0.0, figures['forgetting']):.1%}")
    return ", ".join(words) or None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
