"""The figures that `status` shows above its table: accuracy, matching rate, calibration error, forgetting."""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from mqmk.daemon.metrics.ledger_reader import VersionEvaluation
from mqmk.daemon.status.figures import Share, version_figures
from mqmk.daemon.words import plural
from mqmk.deploy.serving.telemetry.heartbeat import ReplicaStatus


def matching_summary(evaluation: VersionEvaluation | None, reports: Iterable[ReplicaStatus]) -> dict[str, Any]:
    """Accuracy, matching rate and calibration error on held-out images, and forgetting; None if unknown."""
    document = evaluation.document if evaluation else {}
    before = evaluation.when_learned if evaluation else {}
    feedback = [report.feedback for report in reports]
    matched, mismatched = (sum(each.get(name, 0) for each in feedback) for name in ("matched", "mismatched"))
    lost = [before[name] - row["accuracy"] for name, row in document.get("tasks", {}).items() if name in before]
    return version_figures(document).version_document() | {
        "labelled": matched / (matched + mismatched) if matched + mismatched else None,
        "labelled_answers": matched + mismatched,
        "forgetting": fmean(lost) if lost else None,
    }


def summary_line(figures: Mapping[str, Any]) -> str | None:
    """The summary as one line; None before anything is known."""
    words = []
    if figures["accuracy"] is not None:
        words.append(f"accuracy {Share(figures['accuracy'], figures['images'])}")
        words.append(f"matched to the right task {Share(figures['matching_rate'], figures['images']).cell()}")
    if figures["calibration_error"] is not None:
        words.append(f"calibration error {figures['calibration_error']:.1%}")
    if figures["labelled"] is not None:
        answers = plural(figures["labelled_answers"], "labelled answer")
        words.append(f"{figures['labelled']:.1%} of {answers}")
    if figures["forgetting"] is not None:
        words.append(f"forgotten {max(0.0, figures['forgetting']):.1%}")
    return ", ".join(words) or None
