"""How sure is a match, is the picture of anything known, and does traffic still look like the held-out pictures?

Fitted on held-out pictures when a version is built, shipped in the pool as JSON, read by every replica:

    matching["calibration"][matcher]   the probability that a match is right, with its expected calibration error
    matching["unknown"][matcher]       {"threshold", "false_alarm"}: a lower score looks like nothing known
    matching["reference"]              {"matcher", "tasks": {task: {"score", "margin"}}}: histograms, for drift
"""

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mqmk.matcher.errors import MatchError
from mqmk.matcher.matchers import Match

FALSE_ALARM: Final = 0.01
"""Share of known pictures that may be called unknown."""
MOST_BINS: Final = 10
LEAST_IMAGES: Final = 20
"""A task with fewer held-out pictures gets no reference: its drift would be noise."""
WINDOW: Final = 500
"""A task's drift is that of its latest so many pictures."""
HALVINGS: Final = 10
"""How often the pictures are halved to see how far a fit is off: one halving alone says 1 point or 5 by chance."""
_REACH: Final = 4.0  # spreads around the middle within which a score counts
_RIDGE: Final = 1e-3  # keeps slopes finite where right and wrong matches are separable


@dataclass(frozen=True)
class Calibration:
    """p = 1 / (1 + exp(-x)), x = intercept + margin_slope ln(1 + margin / margin_scale) + score_slope s.

    s is the score in spreads around the middle, from -4 to 4. Slopes are never negative: a clearer match is never less
    sure. A margin beyond `most_margin`, or none because there is one task only, counts as `most_margin`.
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
    """Expected calibration error on pictures that were left out of the fit: the mean over random halves."""
    rate_error: float
    """How far the estimated matching rate is from the true one on those pictures: the mean over random halves.

    What it says is on the safe side: the fit that is shipped saw twice as many pictures.
    """

    def probability(self, score: float, margin: float | None) -> float:
        """That a match with this score and margin is right; its mean over answers is the estimated matching rate."""
        margin = self.most_margin if margin is None else min(max(margin, 0.0), self.most_margin)
        spreads = min(max((score - self.score_middle) / self.score_spread, -_REACH), _REACH)
        x = self.intercept + self.margin_slope * math.log1p(margin / self.margin_scale) + self.score_slope * spreads
        return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@dataclass(frozen=True)
class Reference:
    """How the values of held-out pictures were spread: `counts[i]` of them from `edges[i - 1]` up to `edges[i]`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]

    def place(self, value: float) -> int:
        """The bin of a value; the outer two are open."""
        return bisect_right(self.edges, value)


@dataclass(frozen=True)
class TaskReference:
    """What is usual for pictures that are matched to one task."""

    score: Reference
    margin: Reference | None
    """None while there is one task only."""


@dataclass(frozen=True)
class Confidence:
    """All that a pool says about the certainty of one matcher."""

    calibration: Calibration | None = None
    threshold: float | None = None
    """Below this score a picture looks like nothing the pool knows."""
    reference: Mapping[str, TaskReference] = field(default_factory=dict)


@dataclass
class Window:
    """The bins of the latest values, to be compared with a reference."""

    reference: Reference
    most: int = WINDOW
    _places: deque[int] = field(default_factory=deque)
    _counts: Counter[int] = field(default_factory=Counter)

    def add(self, value: float) -> None:
        """One more value; the oldest goes when the window is full."""
        place = self.reference.place(value)
        self._places.append(place)
        self._counts[place] += 1
        if len(self._places) > self.most:
            self._counts[self._places.popleft()] -= 1

    def __len__(self) -> int:
        return len(self._places)

    @property
    def drift(self) -> float:
        """How far the window is from the reference (`drift`)."""
        return drift(self.reference.counts, [self._counts[place] for place in range(len(self.reference.counts))])


def confidence_of(matching: Mapping[str, Any], matcher: str) -> Confidence:
    """What a pool's `matching` says about one matcher; empty where it says nothing."""
    fitted, unknown = matching.get("calibration", {}).get(matcher), matching.get("unknown", {}).get(matcher)
    shipped = matching.get("reference", {})
    tasks = shipped.get("tasks", {}) if shipped.get("matcher") == matcher else {}
    return Confidence(
        calibration=Calibration(**fitted) if fitted else None,
        threshold=unknown["threshold"] if unknown else None,
        reference={
            name: TaskReference(_read(each["score"]), _read(each["margin"]) if each["margin"] else None)
            for name, each in tasks.items()
        },
    )


def matching_confidence(
    found: Mapping[str, Match],
    true_task: Int[Tensor, " images"],
    names: Sequence[str],
    serving: str,
    false_alarm: float = FALSE_ALARM,
) -> dict[str, Any]:
    """What goes into a pool's `matching`, from what each matcher answered on held-out pictures."""
    return {
        "calibration": {
            name: asdict(fit(each.score, each.margin, each.task == true_task)) for name, each in found.items()
        },
        "unknown": {
            name: {"threshold": unknown_threshold(each.score, false_alarm), "false_alarm": false_alarm}
            for name, each in found.items()
        },
        "reference": {"matcher": serving, "tasks": _references(found[serving], names)},
    }


# The estimate


def fit(
    score: Float[Tensor, " images"], margin: Float[Tensor, " images"], right: Bool[Tensor, " images"]
) -> Calibration:
    """A calibration, and how far off it is: fitted on one half of the pictures, asked about the other, many times."""
    if not len(score):
        raise MatchError("expected held-out pictures to calibrate on, got none")
    errors, gaps = [], []
    for here, other in _halvings(len(score)):
        estimates = _estimates(_fitted(score[here], margin[here], right[here]), score[other], margin[other])
        errors.append(calibration_error(estimates, right[other]))
        gaps.append(abs(estimates.mean().item() - right[other].double().mean().item()))
    return replace(_fitted(score, margin, right), error=fmean(errors), rate_error=fmean(gaps))


def _halvings(images: int) -> Iterator[tuple[Int[Tensor, " half"], Int[Tensor, " rest"]]]:
    """Random halves, the same ones every time; one picture alone is both."""
    dice = torch.Generator().manual_seed(0)
    for _ in range(HALVINGS):
        order = torch.randperm(images, generator=dice)
        yield (order[: images // 2], order[images // 2 :]) if images > 1 else (order, order)


def _estimates(
    model: Calibration, score: Float[Tensor, " images"], margin: Float[Tensor, " images"]
) -> Float[Tensor, " images"]:
    pairs = zip(score.tolist(), margin.tolist(), strict=True)
    return torch.tensor([model.probability(*pair) for pair in pairs], dtype=torch.float64)


def calibration_error(
    estimates: Float[Tensor, " images"], right: Bool[Tensor, " images"], bins: int = MOST_BINS
) -> float:
    """Expected calibration error: |mean estimate - true rate| in bins of equally many pictures, averaged."""
    order = estimates.argsort(stable=True)
    parts = [part for part in order.tensor_split(bins) if len(part)]
    gaps = [len(part) * (estimates[part].mean() - right[part].double().mean()).abs().item() for part in parts]
    return sum(gaps) / len(order)


def _fitted(
    score: Float[Tensor, " images"], margin: Float[Tensor, " images"], right: Bool[Tensor, " images"]
) -> Calibration:
    score, margin = score.double().cpu(), margin.double().cpu()
    finite = margin[margin.isfinite()].clamp(min=0)
    most = finite.max().item() if len(finite) else 0.0
    scale = max(finite.median().item() if len(finite) else 0.0, 1e-6)
    middle, spread = score.mean().item(), max(score.std(correction=0).item(), 1e-6)
    margin = margin.nan_to_num(posinf=most).clamp(0, most)
    features = torch.stack([torch.log1p(margin / scale), ((score - middle) / spread).clamp(-_REACH, _REACH)], dim=1)
    intercept, slopes = _logistic(features, _smoothed(right.cpu()))
    return Calibration(intercept, *slopes, scale, most, middle, spread, len(score), 0.0, 0.0)


def _smoothed(right: Bool[Tensor, " images"]) -> Float[Tensor, " images"]:
    """Platt's targets: as if one more match had been right and one more wrong, so that nothing is ever certain."""
    good = int(right.sum())
    bad = len(right) - good
    return torch.where(right, (good + 1) / (good + 2), 1 / (bad + 2)).double()


def _logistic(
    features: Float[Tensor, "images kinds"], targets: Float[Tensor, " images"]
) -> tuple[float, tuple[float, float]]:
    """Intercept and slopes by Newton's method; a slope that would be negative is left out."""
    used = [kind for kind in range(features.shape[1]) if features[:, kind].std(correction=0) > 1e-9]
    while True:
        weights = _newton(torch.cat([torch.ones(len(features), 1).double(), features[:, used]], dim=1), targets)
        slopes = dict(zip(used, weights[1:].tolist(), strict=True))
        if all(slope >= 0 for slope in slopes.values()):
            return weights[0].item(), (slopes.get(0, 0.0), slopes.get(1, 0.0))
        used.remove(min(slopes, key=lambda kind: slopes[kind]))


def _newton(rows: Float[Tensor, "images kinds"], targets: Float[Tensor, " images"]) -> Float[Tensor, " kinds"]:
    ridge = torch.full((rows.shape[1],), _RIDGE * len(rows), dtype=torch.float64)
    ridge[0] = 1e-9
    weights = torch.zeros(rows.shape[1], dtype=torch.float64)
    for _ in range(50):
        p = (rows @ weights).sigmoid()
        slope = rows.T @ (targets - p) - ridge * weights
        curve = rows.T @ (rows * (p * (1 - p)).clamp(min=1e-9)[:, None]) + ridge.diag()
        step: Tensor = torch.linalg.solve(curve, slope)
        step = step * min(1.0, 5.0 / max(step.norm().item(), 1e-12))  # far from the answer a full step may overshoot
        weights = weights + step
        if step.norm() < 1e-10:
            break
    return weights


# Unknown pictures, and drift


def unknown_threshold(score: Float[Tensor, " images"], false_alarm: float = FALSE_ALARM) -> float:
    """The highest threshold that calls at most this share of known pictures unknown."""
    ordered = score.double().sort().values
    return ordered[min(int(false_alarm * len(ordered)), len(ordered) - 1)].item()


def reference_of(values: Sequence[float]) -> Reference:
    """A histogram with at most ten bins of about equally many values."""
    bins = max(2, min(MOST_BINS, len(values) // 10))
    ordered = sorted(values)
    cuts = {round(ordered[len(ordered) * place // bins], 6) for place in range(1, bins)}
    empty = Reference(tuple(sorted(cuts)), ())
    places = Counter(empty.place(value) for value in values)
    return Reference(empty.edges, tuple(places[place] for place in range(len(empty.edges) + 1)))


def population_stability_index(reference: Sequence[int], live: Sequence[int]) -> float:
    """PSI = sum of (q - p) ln(q / p) over bins; half a picture is added to each bin, so that none is empty."""
    p, q = _shares(reference), _shares(live)
    return sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True))


def drift(reference: Sequence[int], live: Sequence[int]) -> float:
    """PSI beyond what chance gives in all but one of a thousand cases, so that hundreds of tasks give no false alarm.

    Without drift it is (1/n + 1/m) times a chi-squared number with bins - 1 degrees, which few pictures make large.
    """
    n, m = sum(reference), sum(live)
    if not n or not m or len(reference) < 2:
        return 0.0
    return max(0.0, population_stability_index(reference, live) - (1 / n + 1 / m) * _chi_squared(len(reference) - 1))


def _chi_squared(degrees: int) -> float:
    """What a chi-squared number exceeds once in a thousand times (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 3.0902 * math.sqrt(part)) ** 3  # the normal distribution's quantile


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts) + 0.5 * len(counts)
    return [(count + 0.5) / total for count in counts]


def _references(found: Match, names: Sequence[str]) -> dict[str, Any]:
    """By the task that was matched: in traffic nobody knows the true one."""
    references: dict[str, Any] = {}
    for number, name in enumerate(names):
        here = found.task == number
        if here.sum() >= LEAST_IMAGES:
            margins = [margin for margin in found.margin[here].tolist() if math.isfinite(margin)]
            references[name] = {
                "score": asdict(reference_of(found.score[here].tolist())),
                "margin": asdict(reference_of(margins)) if len(margins) >= LEAST_IMAGES else None,
            }
    return references


def _read(fields: Mapping[str, Any]) -> Reference:
    return Reference(tuple(fields["edges"]), tuple(fields["counts"]))
