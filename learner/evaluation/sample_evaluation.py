"""How well each matcher of a service does on a sample of held-out images.

Answers are those of a service (`sample_answers.py`). Exact matchers may have been measured on fewer images than the
others (`sample_matches.py`).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from mqmk.learner.evaluation.calibration_fit import calibration_error
from mqmk.learner.evaluation.sample import Sample
from mqmk.learner.evaluation.sample_matches import SampleMatch
from mqmk.matcher.matcher_info import EXACT
from mqmk.matcher.pool import PromptPool


@dataclass(frozen=True)
class TaskShare:
    """How one matcher did on the images of one task."""

    images: int
    matching_rate: float
    accuracy: float


@dataclass(frozen=True)
class ClassTally:
    """What one matcher's answers were, class by class. A class that several tasks know counts once, by its label."""

    images: Mapping[str, int]
    right: Mapping[str, int]
    mistakes: Mapping[tuple[str, str], int]
    """Images by true and answered label, where these differ."""


@dataclass(frozen=True)
class SampleTally:
    """How one matcher did; rates from 0 to 1."""

    images: int
    is_estimate: bool
    """Whether the sample has more images than the matcher was measured on."""
    matching_rate: float
    """Share of images matched to a task that knows their class."""
    accuracy: float
    calibration_error: float
    """Expected calibration error of the answers' probabilities."""
    recall_at_3: float
    """Share of images for which a task that knows their class has one of the three best scores."""
    agreement: float
    """Share of the exactly matched images that are matched to the same task."""
    num_queries: float
    """Mean number of queries an image."""
    tasks: Mapping[int, TaskShare]
    """Of the tasks that have images."""
    confusion: Mapping[tuple[int, int], int]
    """Images by true and matched task."""


@dataclass(frozen=True, eq=False)
class SampleEvaluation:
    """What a sample of held-out images says about one pool."""

    pool: PromptPool
    sample: Sample
    matches: Mapping[str, SampleMatch]

    def tally(self, matcher: str, among: Bool[Tensor, " images"] | None = None) -> SampleTally:
        """How a matcher did on some images, or on all of its own if it was measured on none of these."""
        found = self.matches[matcher]
        inside = _within(found, among)
        true = self.sample.task[found.image[inside]].tolist()
        return SampleTally(
            images=len(true),
            is_estimate=len(found.image) < len(self.sample),
            matching_rate=_share(self.is_matched(found)[inside]),
            accuracy=_share(self.is_correct(found)[inside]),
            calibration_error=round(calibration_error(found.probability[inside], self.is_correct(found)[inside]), 4),
            recall_at_3=_share(self._knows(found.image, found.best)[inside].any(dim=1)),
            agreement=self._agreement(found, among),
            num_queries=found.num_queries[inside].float().mean().item(),
            tasks=self.by_task(matcher, among),
            confusion=Counter(zip(true, found.task[inside].tolist(), strict=True)),
        )

    def by_task(self, matcher: str, among: Bool[Tensor, " images"] | None = None) -> dict[int, TaskShare]:
        """How a matcher did on the images of each task that has some."""
        found = self.matches[matcher]
        inside = _within(found, among)
        true = self.sample.task[found.image]
        images, matched, right = (
            Counter(true[some].tolist())
            for some in (inside, inside & self.is_matched(found), inside & self.is_correct(found))
        )
        return {task: TaskShare(n, matched[task] / n, right[task] / n) for task, n in sorted(images.items())}

    def by_class(self, matcher: str, among: Bool[Tensor, " images"] | None = None) -> ClassTally:
        """What was answered for the images of each class that has some."""
        found = self.matches[matcher]
        inside = _within(found, among)
        true = [self._labels[image] for image in found.image[inside].tolist()]
        answers = zip(found.task[inside].tolist(), found.answer[inside].tolist(), strict=True)
        answered = [self.pool.tasks[task].classes[place] for task, place in answers]
        pairs = Counter(zip(true, answered, strict=True))
        right = {label: pairs[label, label] for label in dict.fromkeys(true)}
        return ClassTally(Counter(true), right, {pair: n for pair, n in pairs.items() if pair[0] != pair[1]})

    def _agreement(self, found: SampleMatch, among: Bool[Tensor, " images"] | None) -> float:
        exact = self.matches[EXACT]
        matched = torch.full((len(self.sample),), -1)
        matched[found.image] = found.task
        inside = _within(exact, among)
        return _share(matched[exact.image[inside]] == exact.task[inside])

    def is_matched(self, found: SampleMatch) -> Bool[Tensor, " images"]:
        """Which images were matched to a task that knows their class."""
        return self._knows(found.image, found.task[:, None])[:, 0]

    def is_correct(self, found: SampleMatch) -> Bool[Tensor, " images"]:
        """Which images got their own label, whichever task gave it."""
        answers = zip(found.image.tolist(), found.task.tolist(), found.answer.tolist(), strict=True)
        right = [self.pool.tasks[task].classes[place] == self._labels[image] for image, task, place in answers]
        return torch.tensor(right, dtype=torch.bool)

    def _knows(self, image: Int[Tensor, " images"], task: Int[Tensor, "images some"]) -> Bool[Tensor, "images some"]:
        """Which of these tasks know the class of an image."""
        pairs = zip(image.tolist(), task.tolist(), strict=True)
        known = [[each in self._owners[self._labels[number]] for each in tasks] for number, tasks in pairs]
        return torch.tensor(known, dtype=torch.bool).reshape(task.shape)

    @cached_property
    def _labels(self) -> tuple[str, ...]:
        """The true label of each image."""
        pairs = zip(self.sample.task.tolist(), self.sample.label.tolist(), strict=True)
        return tuple(self.pool.tasks[task].classes[place] for task, place in pairs)

    @cached_property
    def _owners(self) -> dict[str, set[int]]:
        """The tasks that know a label of the sample."""
        owners: dict[str, set[int]] = {label: set() for label in self._labels}
        for number, label in self.pool.labels:
            if label in owners:
                owners[label].add(number)
        return owners


def _within(found: SampleMatch, among: Bool[Tensor, " images"] | None) -> Bool[Tensor, " measured"]:
    everything = torch.ones(len(found.image), dtype=torch.bool)
    inside = everything if among is None else among[found.image]
    return inside if inside.any() else everything


def _share(good: Bool[Tensor, " images"]) -> float:
    return int(good.sum()) / len(good) if len(good) else 0.0


def matching_card(images: int, tallies: Mapping[str, SampleTally]) -> dict[str, Any]:
    """What a pool file says of each matcher, from so many held-out images: the table that `auto` chooses by."""
    return {"held_out": images, "matchers": matcher_figures(tallies)}


def matcher_figures(tallies: Mapping[str, SampleTally]) -> dict[str, dict[str, Any]]:
    """Each matcher's rates and cost, and of how many images; `sampled` where these are only some of the sample."""
    return {
        name: {
            "rate": row.matching_rate,
            "agreement": row.agreement,
            "cost": row.num_queries,
            "accuracy": row.accuracy,
            "calibration_error": row.calibration_error,
            "images": row.images,
            "sampled": row.is_estimate,
        }
        for name, row in tallies.items()
    }
