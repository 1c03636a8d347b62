"""The chance that each class is the right one, by what held-out images said when the version was built.

A matcher that weighs all classes itself gives it directly. Otherwise it is the chance that the match is right
(`calibration.py`) times the share of the class among those of the matched task:

    matching["answers"][matcher]       {"classifier", "scale"}: the classifier that answers best, and its sharpness
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.matcher.calibration import read_confidence
from mqmk.matcher.classifiers import logits
from mqmk.matcher.matcher_info import AUTO
from mqmk.matcher.matchers import Match
from mqmk.matcher.pool import PromptPool, cache_on_pool


@dataclass(frozen=True)
class Answering:
    """How classes are weighed once the task is matched."""

    classifier: str = "fc"
    scale: float | None = None
    """Of cosines, in the exponent; None takes the one that heads were trained with."""


@cache_on_pool
def read_answering(pool: PromptPool, matcher: str) -> Answering:
    """What a pool says for one matcher."""
    return Answering(**pool.matching.get("answers", {}).get(matcher, {}))


def class_probabilities(
    pool: PromptPool, matcher: str, found: Match, classifier: str = AUTO, readout: str = "task"
) -> Float[Tensor, "batch rows"]:
    """Of every class; those of one image sum up to the chance that the match is right."""
    if found.class_logits is not None:
        return found.class_logits.softmax(dim=1)
    answering = read_answering(pool, matcher)
    values = logits(pool, found, answering.classifier if classifier == AUTO else classifier, readout)
    sharpness = 1.0 if answering.scale is None else answering.scale / pool.logit_scale
    shares = (sharpness * values).softmax(dim=1)
    return shares if readout == "all" else shares * match_probabilities(pool, matcher, found)[:, None]


def match_probabilities(pool: PromptPool, matcher: str, found: Match) -> Float[Tensor, " batch"]:
    """The chance that each match is right; 1 where the pool was not calibrated."""
    calibration = read_confidence(pool.matching, matcher).calibration
    if calibration is None:
        return torch.ones_like(found.score)
    pairs = zip(found.score.tolist(), found.margin.tolist(), strict=True)
    return torch.tensor([calibration.probability(*pair) for pair in pairs], device=found.score.device)
