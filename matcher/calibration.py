"""What a pool says about the certainty of a match: is it right, and is the image of anything known?

Fitted on held-out images when a version is built (`learner/evaluation/calibration_fit.py`), shipped in the pool as
JSON, read by every replica:

    matching["calibration"][matcher]   the probability that a match is right, with its expected calibration error
    matching["unknown"][matcher]       {"threshold", "false_alarm", "of": "probability"}: an answer with a lower
                                       probability looks like nothing known; without "of", a lower score (release 0.1)
    matching["reference"]              {"matcher", "tasks": {task: {"score", "margin"}}}: histograms, for drift
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

SCORE_REACH: Final = 4.0
"""Standard deviations around the mean beyond which a score counts no further."""


@dataclass(frozen=True)
class Calibration:
    """p = 1 / (1 + exp(-x)), x = intercept + margin_slope ln(1 + margin / margin_scale) + score_slope s.

    s is the score in standard deviations (`score_spread`) from the mean (`score_middle`), from -4 to 4. Slopes are
    never negative: a clearer match is never less certain. A margin beyond `most_margin`, or none because there is only
    one task, counts as `most_margin`.
    """

    intercept: float
    margin_slope: float
    score_slope: float
    margin_scale: float
    most_margin: float
    score_middle: float
    score_spread: float
    images: int
    error: float
    """Expected calibration error on images that were left out of the fit: the mean over random halves."""
    rate_error: float
    """How far the estimated matching rate is from the true one on those images: the mean over random halves.

    It errs on the safe side: the fit that is shipped saw twice as many images.
    """

    def probability(self, score: float, margin: float | None) -> float:
        """The probability that such a match is right; its mean over predictions is the estimated matching rate."""
        margin = self.most_margin if margin is None else min(max(margin, 0.0), self.most_margin)
        spreads = min(max((score - self.score_middle) / self.score_spread, -SCORE_REACH), SCORE_REACH)
        x = self.intercept + self.margin_slope * math.log1p(margin / self.margin_scale) + self.score_slope * spreads
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@dataclass(frozen=True)
class Reference:
    """A histogram of held-out images: `counts[i]` values from `edges[i - 1]` up to `edges[i]`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def bin_of(self, value: float) -> int:
        """The index of a value's bin; the outer two are open."""
        return bisect_right(self.edges, value)


@dataclass(frozen=True)
class TaskReference:
    """What is usual for images matched to one task."""

    score: Reference
    margin: Reference | None
    """None while there is only one task."""


@dataclass(frozen=True)
class Confidence:
    """Everything a pool says about the certainty of one matcher."""

    calibration: Calibration | None = None
    threshold: float | None = None
    """An answer with a lower probability looks like nothing the pool knows."""
    score_threshold: float | None = None
    """The same for the match score, in pools of release 0.1."""
    reference: Mapping[str, TaskReference] = field(default_factory=dict)

    def is_unknown(self, probability: float, score: float) -> bool | None:
        """Whether an image looks like nothing the pool knows; None if the pool was not calibrated for it."""
        if self.threshold is not None:
            return probability < self.threshold
        return None if self.score_threshold is None else score < self.score_threshold


def read_confidence(matching: Mapping[str, Any], matcher: str) -> Confidence:
    """The part of a pool's `matching` about one matcher; empty where there is none."""
    fitted, unknown = matching.get("calibration", {}).get(matcher), matching.get("unknown", {}).get(matcher)
    shipped = matching.get("reference", {})
    tasks = shipped.get("tasks", {}) if shipped.get("matcher") == matcher else {}
    return Confidence(
        calibration=Calibration(**fitted) if fitted else None,
        threshold=unknown["threshold"] if unknown and "of" in unknown else None,
        score_threshold=unknown["threshold"] if unknown and "of" not in unknown else None,
        reference={
            name: TaskReference(
                _read_histogram(each["score"]), _read_histogram(each["margin"]) if each["margin"] else None
            )
            for name, each in tasks.items()
        },
    )


def _read_histogram(fields: Mapping[str, Any]) -> Reference:
    return Reference(tuple(fields["edges"]), tuple(fields["counts"]))
