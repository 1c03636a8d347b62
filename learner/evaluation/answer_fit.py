"""Which classifier answers best once the task is matched, and how sharp its probabilities are; on held-out images."""

from typing import Final

from jaxtyping import Bool
from torch import Tensor

from mqmk.learner.evaluation.fusion_fit import maximise_likelihood
from mqmk.matcher.classifiers import CLASSIFIERS, logits
from mqmk.matcher.matchers import Match
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.probabilities import Answering

_LEFT_OUT: Final = -100.0
"""In the place of minus infinity, which has no gradient: classes of other tasks."""


def fit_answering(
    pool: PromptPool, found: Match, matched: Bool[Tensor, " images"], is_true: Bool[Tensor, "images rows"]
) -> Answering:
    """From matches of held-out images, whether they are right, and the rows of each image's label."""
    values = {name: logits(pool, found, name, "task") for name in CLASSIFIERS}
    right = {name: int(is_true.gather(1, each.argmax(dim=1, keepdim=True)).sum()) for name, each in values.items()}
    best = max(right, key=lambda name: right[name])
    if not matched.any():
        return Answering(best)
    cosines = (values[best][matched].double() / pool.logit_scale).clamp(min=_LEFT_OUT)
    (scale,) = maximise_likelihood([pool.logit_scale], lambda weights: weights[0] * cosines, is_true[matched])
    return Answering(best, scale)
