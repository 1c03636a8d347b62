"""Errors of the label-free estimate of the matching rate, on images that were not used for its fit."""

from statistics import fmean

import torch
from torch import Tensor

from mqmk.learner.evaluation.calibration_fit import fit_calibration
from mqmk.learner.evaluation.evaluate import Evaluation
from mqmk.matcher.matchers import Match

MATCHERS = ("sqsk", "sqmk", "mqsk", "mqmk", "mqmk-ei", "cascade")
SPLITS = 8


def random_halves(images: int, splits: int = SPLITS) -> list[tuple[Tensor, Tensor]]:
    """Random splits into one half for the fit and one for the evaluation, each used both ways."""
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(images, generator=generator) for _ in range(splits)]
    cut = [(order[: images // 2], order[images // 2 :]) for order in orders]
    return [pair for here, there in cut for pair in ((here, there), (there, here))]


def estimate_error(found: Match, true_task: Tensor, fitted_on: Tensor, evaluated_on: Tensor) -> float:
    """Estimated minus true matching rate."""
    right = found.task == true_task
    calibration = fit_calibration(found.score[fitted_on], found.margin[fitted_on], right[fitted_on])
    pairs = zip(found.score[evaluated_on].tolist(), found.margin[evaluated_on].tolist(), strict=True)
    return fmean(calibration.probability(*pair) for pair in pairs) - right[evaluated_on].double().mean().item()


def estimate_errors(evaluation: Evaluation, matcher: str) -> list[float]:
    """Errors of one matcher over many splits."""
    found, true = evaluation.match(matcher), evaluation.held_out.task
    return [estimate_error(found, true, *pair) for pair in random_halves(len(true))]


def describe_errors(name: str, matcher: str, found: list[float], images: int) -> str:
    """One line of text."""
    sizes = [abs(each) for each in found]
    return (
        f"{name} {matcher}: the estimated rate is off by {fmean(sizes):.2%} on average, {max(sizes):.2%} at worst, "
        f"bias {fmean(found):+.2%} ({len(found)} fits on {images // 2} images, evaluated on as many others)"
    )
