"""What a version says about the certainty of its answers, from matches of images whose true task is known."""

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from mqmk.learner.evaluation.calibration_fit import fit_calibration, fit_confidence
from mqmk.learner.evaluation.sample_matches import SampleMatch
from mqmk.matcher.matchers import Match
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.probabilities import class_probabilities


def calibrate(pool: PromptPool, found: Mapping[str, Match], right: Mapping[str, Tensor], serving: str) -> PromptPool:
    """The pool with calibration, thresholds and references of these matches."""
    curves = {name: asdict(fit_calibration(each.score, each.margin, right[name])) for name, each in found.items()}
    calibrated = pool.with_matching({"calibration": curves})
    answered = {}
    for name, each in found.items():
        probability, answer = class_probabilities(calibrated, name, each).max(dim=1)
        answered[name] = SampleMatch(torch.arange(len(each.task)), each.task, each.score, each.margin,
                                     each.task[:, None], each.num_queries, answer, probability)  # fmt: skip
    confidence = fit_confidence(answered, [task.name for task in pool.tasks], serving)
    return pool.with_matching({**calibrated.matching, **confidence})
