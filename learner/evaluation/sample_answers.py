"""What is answered once a sample is matched: the classifier, the weights of witnesses and the probability of an answer.

All of it is fitted on some images of the sample (`choosing`) and applied to all. Scores are the recorded ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mqmk.learner.evaluation.calibration_fit import fit_calibration
from mqmk.learner.evaluation.fusion_fit import FusionSample, fit_fusion, maximise_likelihood
from mqmk.learner.evaluation.sample import Sample
from mqmk.learner.evaluation.sample_evaluation import SampleEvaluation
from mqmk.learner.evaluation.sample_matches import SHORTLIST, SampleMatch, SampleMatches
from mqmk.learner.evaluation.score_records import ScoreRecords
from mqmk.matcher.calibration import Calibration
from mqmk.matcher.fusion import ClassEvidence, Fusion, Pairs
from mqmk.matcher.keys import max_by_task
from mqmk.matcher.matchers import to_match
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.probabilities import Answering
from mqmk.matcher.regression import fit_regression

MOST_CELLS: Final = 1_000_000
"""Of images x classes that weights are fitted on: five numbers need no more, and a build must stay fast."""
_CLASSIFIERS: Final = {"fc": "head", "km": "key"}
"""Classifier -> what the records call its cosines. With keys in closed form, `ncm` answers as `km` does."""


@dataclass(frozen=True, eq=False)
class MatchedSample:
    """A sample with what its images' queries say about them, before anything is chosen."""

    pool: PromptPool
    sample: Sample
    records: ScoreRecords
    matches: SampleMatches

    def fit(
        self, choosing: Bool[Tensor, " images"], fit: Callable[..., Calibration] = fit_calibration
    ) -> dict[str, Any]:
        """What some of its images say, as it goes into a pool's `matching`."""
        return fit_answers(self.pool, self.sample, self.records, self.matches, choosing, fit)

    def answer(self, fitted: Mapping[str, Any]) -> SampleEvaluation:
        """What a service would answer for its images."""
        return SampleEvaluation(self.pool, self.sample, apply_answers(self.pool, self.records, self.matches, fitted))


@torch.no_grad()
def fit_answers(
    pool: PromptPool,
    sample: Sample,
    records: ScoreRecords,
    matches: SampleMatches,
    choosing: Bool[Tensor, " images"],
    fit: Callable[..., Calibration] = fit_calibration,
) -> dict[str, Any]:
    """What some images of a sample say, as it goes into a pool's `matching`."""
    answers: dict[str, Any] = {}
    for name, found in matches.items():
        answers[name] = asdict(_choose_answering(pool, sample, records, found, _within(found, choosing)))
    fitted: dict[str, Any] = {"answers": answers}
    every = dict(matches)
    if pool.has_statistics and records.has_anchor:
        values, evidence = _weigh(pool, records)
        fusion = _fit_weights(pool, sample, values, evidence, choosing)
        fitted["fusion"] = asdict(fusion)
        every |= _weigh_classes(pool, values, evidence, fusion)
    fitted["calibration"] = {}
    for name, found in every.items():
        some, right = _within(found, choosing), _is_label(pool, sample, found).any(dim=1)
        fitted["calibration"][name] = asdict(fit(found.score[some], found.margin[some], right[some]))
    return fitted


@torch.no_grad()
def apply_answers(
    pool: PromptPool, records: ScoreRecords, matches: SampleMatches, fitted: Mapping[str, Any]
) -> SampleMatches:
    """The matches with answers and their probabilities, and those of matchers that weigh all classes."""
    answered = {
        name: _answer(pool, records, found, Answering(**fitted["answers"][name]),
                      Calibration(**fitted["calibration"][name]))
        for name, found in matches.items()
    }  # fmt: skip
    if "fusion" in fitted and records.has_anchor:
        answered |= _weigh_classes(pool, *_weigh(pool, records), Fusion(**fitted["fusion"]))
    return answered


def _within(found: SampleMatch, choosing: Bool[Tensor, " images"]) -> Bool[Tensor, " measured"]:
    some = choosing[found.image]
    return some if some.any() else torch.ones_like(some)


# One classifier for the matched task


def _cosines(records: ScoreRecords, found: SampleMatch, classifier: str) -> Float[Tensor, "images most"]:
    """Of the classes of the matched task; minus infinity beyond the last."""
    sizes = torch.tensor(records.names.sizes)
    first, size = (sizes.cumsum(0) - sizes)[found.task], sizes[found.task]
    place = torch.arange(int(size.max()))
    rows = (first[:, None] + place).clamp(max=int(sizes.sum()) - 1)
    values = getattr(records, _CLASSIFIERS[classifier])[found.image].gather(1, rows)
    return values.masked_fill(place >= size[:, None], -torch.inf)


def _choose_answering(
    pool: PromptPool, sample: Sample, records: ScoreRecords, found: SampleMatch, some: Bool[Tensor, " images"]
) -> Answering:
    values = {name: _cosines(records, found, name)[some] for name in _CLASSIFIERS}
    true = _is_label(pool, sample, found)[some]
    right = {name: int(true.gather(1, each.argmax(dim=1, keepdim=True)).sum()) for name, each in values.items()}
    best, known = max(right, key=lambda name: right[name]), true.any(dim=1)
    if not known.any():
        return Answering(best)
    cosines = values[best][known].double().clamp(min=-100.0)
    (scale,) = maximise_likelihood([pool.logit_scale], lambda weights: weights[0] * cosines, true[known])
    return Answering(best, scale)


def _answer(
    pool: PromptPool, records: ScoreRecords, found: SampleMatch, answering: Answering, calibration: Calibration
) -> SampleMatch:
    scale = pool.logit_scale if answering.scale is None else answering.scale
    best = (scale * _cosines(records, found, answering.classifier)).softmax(dim=1).max(dim=1)
    pairs = zip(found.score.tolist(), found.margin.tolist(), strict=True)
    matched = torch.tensor([calibration.probability(*pair) for pair in pairs])
    return replace(found, answer=best.indices, probability=best.values * matched)


# All classes weighed together


def _weigh(pool: PromptPool, records: ScoreRecords) -> tuple[Float[Tensor, "images rows"], ClassEvidence]:
    """What the regression says, and what was recorded of the tasks that it shortlists: a service asks no other one."""
    values = fit_regression(pool).values(records.anchor)
    pairs = Pairs.of_shortlist(pool, values, SHORTLIST)
    asked = torch.zeros_like(records.task_scores, dtype=torch.bool)
    asked[pairs.image, pairs.task] = True
    here = asked[:, pool.row_task]
    return values, ClassEvidence(*(each.masked_fill(~here, torch.nan) for each in (records.key, records.head)))


def _fit_weights(
    pool: PromptPool,
    sample: Sample,
    values: Float[Tensor, "images rows"],
    evidence: ClassEvidence,
    choosing: Bool[Tensor, " images"],
) -> Fusion:
    some = choosing.nonzero()[:, 0][: max(50, MOST_CELLS // values.shape[1])]
    labels = {label: number for number, label in enumerate(dict.fromkeys(label for _, label in pool.labels))}
    of_row = torch.tensor([labels[label] for _, label in pool.labels])
    true = of_row[_true_row(pool, sample)[some]]
    return fit_fusion(
        FusionSample(
            values[some], ClassEvidence(evidence.key[some], evidence.head[some]), true[:, None] == of_row[None]
        )
    )


def _weigh_classes(
    pool: PromptPool, values: Float[Tensor, "images rows"], evidence: ClassEvidence, fusion: Fusion
) -> SampleMatches:
    """What `anchor` and `fused` answer."""
    certain = fusion.is_certain(values)
    accepted = ClassEvidence(*(each.masked_fill(certain[:, None], torch.nan) for each in (evidence.key, evidence.head)))
    queries = torch.where(certain, 1, 1 + min(SHORTLIST, len(pool.tasks)))
    return {
        "anchor": _match_classes(pool, fusion.anchor * values, torch.ones_like(queries)),
        "fused": _match_classes(pool, fusion.class_logits(values, accepted), queries),
    }


def _match_classes(
    pool: PromptPool, logits: Float[Tensor, "images rows"], num_queries: Int[Tensor, " images"]
) -> SampleMatch:
    probabilities = logits.softmax(dim=1)
    scores = max_by_task(probabilities, pool.row_task, len(pool.tasks))
    found, row = to_match(scores, torch.zeros(len(scores), 0), 0), probabilities.argmax(dim=1)
    first = torch.tensor([rows.start for rows in pool.rows_of_task])
    best = scores.topk(min(3, scores.shape[1]), dim=1).indices
    return SampleMatch(
        torch.arange(len(scores)), found.task, found.score, found.margin, best, num_queries,
        row - first[found.task], probabilities.amax(dim=1),
    )  # fmt: skip


# Labels


def _true_row(pool: PromptPool, sample: Sample) -> Int[Tensor, " images"]:
    first = torch.tensor([rows.start for rows in pool.rows_of_task])
    return first[sample.task] + sample.label


def _is_label(pool: PromptPool, sample: Sample, found: SampleMatch) -> Bool[Tensor, "images most"]:
    """Which classes of the matched task are the image's own."""
    names = [task.classes for task in pool.tasks]
    most = max(len(names[task]) for task in found.task.unique().tolist())
    own = torch.zeros(len(found.image), most, dtype=torch.bool)
    pairs = zip(found.image.tolist(), found.task.tolist(), strict=True)
    for row, (image, task) in enumerate(pairs):
        label = names[int(sample.task[image])][int(sample.label[image])]
        if int(sample.task[image]) == task:
            own[row, int(sample.label[image])] = True
        elif label in names[task]:
            own[row, names[task].index(label)] = True
    return own
