"""Fit what a pool says about the certainty of its matches, on held-out images: calibration, threshold, histograms.

`matcher/calibration.py` describes the JSON and reads it.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mqmk.learner.evaluation.sample_matches import SampleMatch
from mqmk.matcher.calibration import SCORE_REACH, Calibration, Reference
from mqmk.matcher.errors import MatchError

FALSE_ALARM: Final = 0.01
"""Share of known images that may be called unknown."""
MAX_BINS: Final = 10
MIN_IMAGES: Final = 20
"""A task with fewer held-out images gets no reference: its drift would be noise."""
HALVINGS: Final = 10
"""How often the images are halved to measure the error of a fit: a single halving gives 1 point or 5 by chance."""
_RIDGE: Final = 1e-3  # keeps slopes finite where right and wrong matches are separable


def fit_confidence(
    found: Mapping[str, SampleMatch], names: Sequence[str], serving: str, false_alarm: float = FALSE_ALARM
) -> dict[str, Any]:
    """What goes into a pool's `matching` besides answers and calibration, from each matcher's answers."""
    return {
        "unknown": {
            name: {
                "threshold": unknown_threshold(each.probability, false_alarm),
                "false_alarm": false_alarm,
                "of": "probability",
            }
            for name, each in found.items()
        },
        "reference": {"matcher": serving, "tasks": _build_references(found[serving], names)},
    }


def fit_calibration(
    score: Float[Tensor, " images"], margin: Float[Tensor, " images"], right: Bool[Tensor, " images"]
) -> Calibration:
    """A calibration with its error: fitted on one half of the images and tested on the other, many times."""
    if not len(score):
        raise MatchError("expected held-out images to calibrate on, got none")
    errors, gaps = [], []
    for here, other in _random_halves(len(score)):
        estimates = _estimate(fit_calibration_once(score[here], margin[here], right[here]), score[other], margin[other])
        errors.append(calibration_error(estimates, right[other]))
        gaps.append(abs(estimates.mean().item() - right[other].double().mean().item()))
    return replace(fit_calibration_once(score, margin, right), error=fmean(errors), rate_error=fmean(gaps))


def _random_halves(images: int) -> Iterator[tuple[Int[Tensor, " half"], Int[Tensor, " rest"]]]:
    """Random halves, the same ones every time; one image alone is both."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(HALVINGS):
        order = torch.randperm(images, generator=generator)
        yield (order[: images // 2], order[images // 2 :]) if images > 1 else (order, order)


def _estimate(
    model: Calibration, score: Float[Tensor, " images"], margin: Float[Tensor, " images"]
) -> Float[Tensor, " images"]:
    pairs = zip(score.tolist(), margin.tolist(), strict=True)
    return torch.tensor([model.probability(*pair) for pair in pairs], dtype=torch.float64)


def calibration_error(
    estimates: Float[Tensor, " images"], right: Bool[Tensor, " images"], bins: int = MAX_BINS
) -> float:
    """Expected calibration error: |mean estimate - true rate| in bins of equally many images, averaged."""
    order = estimates.argsort(stable=True)
    parts = [part for part in order.tensor_split(bins) if len(part)]
    gaps = [len(part) * (estimates[part].mean() - right[part].double().mean()).abs().item() for part in parts]
    return sum(gaps) / len(order)


def fit_calibration_once(
    score: Float[Tensor, " images"], margin: Float[Tensor, " images"], right: Bool[Tensor, " images"]
) -> Calibration:
    """A calibration without its error."""
    score, margin = score.double().cpu(), margin.double().cpu()
    finite = margin[margin.isfinite()].clamp(min=0)
    most = finite.max().item() if len(finite) else 0.0
    scale = max(finite.median().item() if len(finite) else 0.0, 1e-6)
    middle, spread = score.mean().item(), max(score.std(correction=0).item(), 1e-6)
    margin = margin.nan_to_num(posinf=most).clamp(0, most)
    spreads = ((score - middle) / spread).clamp(-SCORE_REACH, SCORE_REACH)
    features = torch.stack([torch.log1p(margin / scale), spreads], dim=1)
    intercept, slopes = _fit_logistic(features, _smooth_targets(right.cpu()))
    return Calibration(intercept, *slopes, scale, most, middle, spread, len(score), 0.0, 0.0)


def _smooth_targets(right: Bool[Tensor, " images"]) -> Float[Tensor, " images"]:
    """Platt's targets: as if one more match had been right and one more wrong, so that nothing is ever certain."""
    good = int(right.sum())
    bad = len(right) - good
    return torch.where(right, (good + 1) / (good + 2), 1 / (bad + 2)).double()


def _fit_logistic(
    features: Float[Tensor, "images kinds"], targets: Float[Tensor, " images"]
) -> tuple[float, tuple[float, float]]:
    """Intercept and slopes by Newton's method; a slope that would be negative is left out."""
    used = [kind for kind in range(features.shape[1]) if features[:, kind].std(correction=0) > 1e-9]
    while True:
        weights = _solve_newton(torch.cat([torch.ones(len(features), 1).double(), features[:, used]], dim=1), targets)
        slopes = dict(zip(used, weights[1:].tolist(), strict=True))
        if all(slope >= 0 for slope in slopes.values()):
            return weights[0].item(), (slopes.get(0, 0.0), slopes.get(1, 0.0))
        used.remove(min(slopes, key=lambda kind: slopes[kind]))


def _solve_newton(rows: Float[Tensor, "images kinds"], targets: Float[Tensor, " images"]) -> Float[Tensor, " kinds"]:
    ridge = torch.full((rows.shape[1],), _RIDGE * len(rows), dtype=torch.float64)
    ridge[0] = 1e-9
    weights = torch.zeros(rows.shape[1], dtype=torch.float64)
    for _ in range(50):
        p = (rows @ weights).sigmoid()
        slope = rows.T @ (targets - p) - ridge * weights
        curve = rows.T @ (rows * (p * (1 - p)).clamp(min=1e-9)[:, None]) + ridge.diag()
        step: Tensor = torch.linalg.solve(curve, slope)
        step = step * min(1.0, 5.0 / max(step.norm().item(), 1e-12))  # far from the solution a full step may overshoot
        weights = weights + step
        if step.norm() < 1e-10:
            break
    return weights


def unknown_threshold(probability: Float[Tensor, " images"], false_alarm: float = FALSE_ALARM) -> float:
    """The highest threshold that calls at most this share of known images unknown."""
    ordered = probability.double().sort().values
    return ordered[min(int(false_alarm * len(ordered)), len(ordered) - 1)].item()


def build_reference(values: Sequence[float]) -> Reference:
    """A histogram with at most ten bins of about equally many values."""
    bins = max(2, min(MAX_BINS, len(values) // 10))
    ordered = sorted(values)
    cuts = {round(ordered[len(ordered) * place // bins], 6) for place in range(1, bins)}
    empty = Reference(tuple(sorted(cuts)), ())
    counts = Counter(empty.bin_of(value) for value in values)
    return Reference(empty.edges, tuple(counts[number] for number in range(len(empty.edges) + 1)))


def _build_references(found: SampleMatch, names: Sequence[str]) -> dict[str, Any]:
    """By matched task: the true one is unknown in traffic."""
    references: dict[str, Any] = {}
    for number, name in enumerate(names):
        here = found.task == number
        if here.sum() >= MIN_IMAGES:
            margins = [margin for margin in found.margin[here].tolist() if math.isfinite(margin)]
            references[name] = {
                "score": asdict(build_reference(found.score[here].tolist())),
                "margin": asdict(build_reference(margins)) if len(margins) >= MIN_IMAGES else None,
            }
    return references
