"""Which class the matched query belongs to: `fc` (linear head), `ncm` (nearest class mean), `km` (best key).

Each gives a logit for every head row of the pool. The read-out then decides which rows may win: those of all classes
seen so far (the paper), or only those of the matched task.
"""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.errors import MatchError
from mqmk.matcher.keys import key_of_class, trained_keys
from mqmk.matcher.matchers import Match
from mqmk.matcher.pool import PromptPool

Classifier = Callable[[PromptPool, Float[Tensor, "batch dim"]], Float[Tensor, "batch rows"]]


def _fc(pool: PromptPool, query: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch rows"]:
    return pool.logit_scale * query @ pool.head.T


def _ncm(pool: PromptPool, query: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch rows"]:
    return pool.logit_scale * query @ pool.means.T


def _km(pool: PromptPool, query: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch rows"]:
    """Classes that share a key share its logit; the first of them wins."""
    bank, places = trained_keys(pool, None), key_of_class(pool)
    cosines = (query @ bank.keys.T).split(bank.sizes, dim=1)
    return pool.logit_scale * torch.cat([own[:, place] for own, place in zip(cosines, places, strict=True)], dim=1)


CLASSIFIERS: Final[dict[str, Classifier]] = {"fc": _fc, "ncm": _ncm, "km": _km}
READOUTS: Final = ("task", "all")


def logits(pool: PromptPool, match: Match, classifier: str, readout: str) -> Float[Tensor, "batch rows"]:
    """A logit for every head row, the match's own if it has some; -inf for rows that the read-out leaves out."""
    if classifier not in CLASSIFIERS:
        raise MatchError(f"no classifier is called {classifier!r}; choose one of {', '.join(CLASSIFIERS)}")
    if readout not in READOUTS:
        raise MatchError(f"no read-out is called {readout!r}; choose one of {', '.join(READOUTS)}")
    values = match.class_logits
    if values is None:
        values = CLASSIFIERS[classifier](pool, F.normalize(match.query, dim=1))
    if readout == "all":
        return values
    return values.masked_fill(pool.row_task != match.task[:, None], -torch.inf)
