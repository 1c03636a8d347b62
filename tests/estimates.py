"""How far the estimate without labels is from the truth, on pictures that its fit did not see."""

from statistics import fmean

import torch
from torch import Tensor

from mqmk.learner.evaluate import Evaluation
from mqmk.matcher.calibration import fit
from mqmk.matcher.matchers import Match

MATCHERS = ("sqsk", "sqmk", "mqsk", "mqmk", "mqmk-ei", "cascade")
SPLITS = 8


def halves(images: int, splits: int = SPLITS) -> list[tuple[Tensor, Tensor]]:
    """Some pictures for the fit and as many others for the truth, drawn anew each time; then the other way round."""
    dice = torch.Generator().manual_seed(1)
    orders = [torch.randperm(images, generator=dice) for _ in range(splits)]
    cut = [(order[: images // 2], order[images // 2 :]) for order in orders]
    return [pair for here, there in cut for pair in ((here, there), (there, here))]


def error(found: Match, true_task: Tensor, fitted_on: Tensor, asked: Tensor) -> float:
    """Estimated minus true matching rate."""
    right = found.task == true_task
    sure = fit(found.score[fitted_on], found.margin[fitted_on], right[fitted_on])
    pairs = zip(found.score[asked].tolist(), found.margin[asked].tolist(), strict=True)
    return fmean(sure.probability(*pair) for pair in pairs) - right[asked].double().mean().item()


def errors(evaluation: Evaluation, matcher: str) -> list[float]:
    """Of one matcher, over many halves."""
    found, true = evaluation.match(matcher), evaluation.held_out.task
    return [error(found, true, *pair) for pair in halves(len(true))]


def told(name: str, matcher: str, found: list[float], images: int) -> str:
    """One line for people."""
    sizes = [abs(each) for each in found]
    return (
        f"{name} {matcher}: the estimated rate is off by {fmean(sizes):.2%} on average, {max(sizes):.2%} at worst, "
        f"bias {fmean(found):+.2%} ({len(found)} times fitted on {images // 2} pictures, asked about as many others)"
    )
