"""How accurate are predictions of labelled images? Counted class by class."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from mqmk.daemon.client.predictor import PredictionResult
from mqmk.daemon.errors import DaemonError

MOST_CONFUSIONS: Final = 100
MOST_MISTAKES: Final = 24
"""Of those that are kept for people: the most frequent confusions, and the most confident mistakes."""


@dataclass(frozen=True)
class ClassScore:
    """The predictions of one class's images."""

    label: str
    tasks: tuple[str, ...]
    """Tasks with this class; none if it was never learned."""
    images: int
    """Images with an answer."""
    right: int
    """Images with the right label."""
    matched: int
    """Images matched to a task with their class."""
    unknown: int | None
    """Images flagged as unknown; None if the pool has no threshold."""
    mistaken_for: str | None
    """The most frequent wrong label."""

    @property
    def accuracy(self) -> float | None:
        """None without images, and for a class that was never learned."""
        return self.right / self.images if self.images and self.tasks else None

    @property
    def matching_rate(self) -> float | None:
        """None as for accuracy."""
        return self.matched / self.images if self.images and self.tasks else None

    @property
    def unknown_share(self) -> float | None:
        """None without images, or if the pool has no threshold."""
        return self.unknown / self.images if self.images and self.unknown is not None else None


@dataclass(frozen=True)
class Confusion:
    """Images of one class that were answered as another."""

    label: str
    answered: str
    images: int


@dataclass(frozen=True)
class Mistake:
    """One image of a learned class with a wrong answer."""

    file: Path
    label: str
    answered: str
    task: str
    """The matched one."""
    probability: float
    unknown: bool | None


@dataclass(frozen=True)
class Score:
    """The answers about all images. Accuracy, matching rate and mistakes are of classes that were learned."""

    classes: tuple[ClassScore, ...]
    confusions: tuple[Confusion, ...]
    """The most frequent ones first."""
    mistakes: tuple[Mistake, ...]
    """The most confident ones first."""
    calibration_error: float | None
    """Expected calibration error of `probability`; None without images of learned classes."""
    versions: tuple[int, ...]
    """Of the pool; more than one if a new version was swapped in meanwhile."""
    matchers: tuple[str, ...]

    @property
    def learned(self) -> tuple[ClassScore, ...]:
        """Classes of the pool, with images."""
        return tuple(each for each in self.classes if each.tasks and each.images)

    @property
    def worst_first(self) -> tuple[ClassScore, ...]:
        """All classes by accuracy; those without one come last."""
        return tuple(sorted(self.classes, key=lambda each: 2.0 if each.accuracy is None else each.accuracy))

    @property
    def unlearned(self) -> tuple[ClassScore, ...]:
        """Classes that are not in the pool, with images."""
        return tuple(each for each in self.classes if not each.tasks and each.images)

    @property
    def images(self) -> int:
        """How many, of learned classes."""
        return sum(each.images for each in self.learned)

    @property
    def accuracy(self) -> float | None:
        """Share of images with the right label; this and the next three are None without images of learned classes."""
        return sum(each.right for each in self.learned) / self.images if self.learned else None

    @property
    def accuracy_by_class(self) -> float | None:
        """The mean over classes: small ones count as much as large ones."""
        return fmean(each.right / each.images for each in self.learned) if self.learned else None

    @property
    def matching_rate(self) -> float | None:
        """Share of images that were matched to a task with their class."""
        return sum(each.matched for each in self.learned) / self.images if self.learned else None

    @property
    def unknown_share(self) -> float | None:
        """Share of images of learned classes that were flagged as unknown: false alarms."""
        return unknown_share(self.learned)


def unknown_share(classes: Sequence[ClassScore]) -> float | None:
    """Share of the images of some classes that were flagged as unknown; None if the pool has no threshold."""
    counts = [each.unknown for each in classes if each.unknown is not None]
    return sum(counts) / sum(each.images for each in classes) if counts and len(counts) == len(classes) else None


def find_owners(classes: Iterable[str], tasks: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The tasks that have each class."""
    return {label: tuple(name for name, known in tasks.items() if label in known) for label in classes}


def score_results(
    classes: Mapping[str, Sequence[Path]], owners: Mapping[str, tuple[str, ...]], results: Iterable[PredictionResult]
) -> Score:
    """Count correct answers class by class; DaemonError if no image got an answer."""
    by_file = {each.file: each for each in results}
    found = [_score_class(label, owners[label], [by_file[file] for file in files]) for label, files in classes.items()]
    answers = [each.answer for each in by_file.values() if each.answer is not None]
    if not answers:
        raise DaemonError(f"no image got an answer: {_first_error(by_file.values())}")
    learned = [(label, by_file[file]) for label, files in classes.items() if owners[label] for file in files]
    return Score(
        tuple(found),
        _count_confusions(learned),
        _find_mistakes(learned),
        _measure_calibration(learned),
        tuple(sorted({answer["pool_version"] for answer in answers})),
        tuple(sorted({answer["matcher"] for answer in answers})),
    )


def _score_class(label: str, tasks: tuple[str, ...], results: Sequence[PredictionResult]) -> ClassScore:
    answers = [each.answer for each in results if each.answer is not None]
    unknown = [answer["match"]["unknown"] for answer in answers]
    wrong = Counter(answer["label"] for answer in answers if answer["label"] != label)
    return ClassScore(
        label=label,
        tasks=tasks,
        images=len(answers),
        right=len(answers) - wrong.total(),
        matched=sum(answer["task"] in tasks for answer in answers),
        unknown=None if None in unknown else sum(unknown),
        mistaken_for=wrong.most_common(1)[0][0] if wrong else None,
    )


def _count_confusions(results: Iterable[tuple[str, PredictionResult]]) -> tuple[Confusion, ...]:
    pairs = Counter((label, each.answer["label"]) for label, each in results if each.answer is not None)
    wrong = [Confusion(*pair, images) for pair, images in pairs.items() if pair[0] != pair[1]]
    return tuple(sorted(wrong, key=lambda each: (-each.images, each.label, each.answered))[:MOST_CONFUSIONS])


def _find_mistakes(results: Iterable[tuple[str, PredictionResult]]) -> tuple[Mistake, ...]:
    wrong = [
        Mistake(each.file, label, answer["label"], answer["task"], answer["probability"], answer["match"]["unknown"])
        for label, each in results
        if (answer := each.answer) is not None and answer["label"] != label
    ]
    return tuple(sorted(wrong, key=lambda each: -each.probability)[:MOST_MISTAKES])


def _measure_calibration(results: Iterable[tuple[str, PredictionResult]]) -> float | None:
    """As of held-out images when a version is built: one definition, in the learner."""
    answers = [(each.answer["probability"], each.answer["label"] == label) for label, each in results if each.answer]
    if not answers:
        return None
    import torch

    from mqmk.learner.evaluation.calibration_fit import calibration_error

    probability, right = zip(*answers, strict=True)
    return calibration_error(torch.tensor(probability, dtype=torch.float64), torch.tensor(right))


def _first_error(results: Iterable[PredictionResult]) -> str:
    return next((each.error for each in results if each.error), "there are no images")
