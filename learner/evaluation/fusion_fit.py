"""Fit the weights of `fused` and `anchor` on held-out images (`matcher/fusion.py` says what they are).

The weights maximise the likelihood of the true classes. With few images they stay near the defaults, which count as
much as PRIOR_IMAGES images. `accept` is then the lowest certainty at which answering by the regression alone costs at
most ACCEPTED_LOSS of the accuracy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mqmk.matcher.fusion import ClassEvidence, Fusion

PRIOR_IMAGES: Final = 5.0
ACCEPTED_LOSS: Final = 0.001
_STEPS: Final = 60


@dataclass(frozen=True, eq=False)
class FusionSample:
    """What the witnesses say about some held-out images, every one of them with exact queries."""

    values: Float[Tensor, "images rows"]
    """Of the regression."""
    evidence: ClassEvidence
    is_true: Bool[Tensor, "images rows"]
    """Rows of the true label; several tasks may know it."""

    def among(self, images: Bool[Tensor, " images"]) -> "FusionSample":
        """Some of the images."""
        evidence = ClassEvidence(self.evidence.key[images], self.evidence.head[images])
        return FusionSample(self.values[images], evidence, self.is_true[images])


def fit_fusion(sample: FusionSample) -> Fusion:
    """The weights for a version; the defaults without images."""
    if not len(sample.values):
        return Fusion()
    values, is_true = sample.values.double(), sample.is_true
    scored = ~sample.evidence.key.isnan()
    key, head = (each.double().nan_to_num(nan=0.0) for each in (sample.evidence.key, sample.evidence.head))
    (anchor,) = maximise_likelihood([Fusion.anchor], lambda w: w[0] * values, is_true)

    def fused(weights: Tensor) -> Tensor:
        return weights[0] * values + torch.where(scored, weights[1] * key + weights[2] * head, weights[3])

    start = [Fusion.regression, Fusion.key, Fusion.head, Fusion.unscored]
    regression, by_key, by_head, unscored = maximise_likelihood(start, fused, is_true)
    weights = Fusion(anchor, regression, by_key, by_head, unscored)
    return Fusion(anchor, regression, by_key, by_head, unscored, _choose_accept(sample, weights))


def maximise_likelihood(
    start: list[float], logits_of: Callable[[Tensor], Tensor], is_true: Bool[Tensor, "images rows"]
) -> list[float]:
    """Positive weights, as powers of e, so that the prior is on their order of magnitude."""
    centre = torch.tensor(start, dtype=torch.float64).log()
    powers = centre.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([powers], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        logits = logits_of(powers.exp())
        right = logits.masked_fill(~is_true, -math.inf).logsumexp(dim=1)
        surprise = (logits.logsumexp(dim=1) - right).sum() + PRIOR_IMAGES * (powers - centre).square().sum()
        (surprise / len(is_true)).backward()
        return surprise.detach() / len(is_true)

    with torch.enable_grad():
        optimiser.step(loss)
    return [float(power) for power in powers.detach().exp()]


def _choose_accept(sample: FusionSample, weights: Fusion) -> float:
    alone = (weights.anchor * sample.values).softmax(dim=1)
    certainty = alone.amax(dim=1)
    right_alone = _is_right(alone, sample.is_true)
    right = _is_right(weights.class_logits(sample.values, sample.evidence), sample.is_true)
    order = certainty.argsort(descending=True)
    lost = (right[order].double() - right_alone[order].double()).cumsum(0) / len(order)
    allowed = (lost <= ACCEPTED_LOSS).nonzero()[:, 0]
    return float(certainty[order[allowed[-1]]]) if len(allowed) else 1.0


def _is_right(logits: Float[Tensor, "images rows"], is_true: Bool[Tensor, "images rows"]) -> Bool[Tensor, " images"]:
    return is_true.gather(1, logits.argmax(dim=1, keepdim=True))[:, 0]
