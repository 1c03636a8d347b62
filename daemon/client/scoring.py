"""How accurate are predictions of labelled images? Counted class by class."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mqmk.daemon.client.predictor import PredictionResult
from mqmk.daemon.errors import DaemonError


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
class Score:
    """The answers about all images. Accuracy and matching rate are of classes that were learned."""

    classes: tuple[ClassScore, ...]
    versions: tuple[int, ...]
    """Of the pool; more than one if a new version was swapped in meanwhile."""
    matchers: tuple[str, ...]

    @property
    def learned(self) -> tuple[ClassScore, ...]:
        """Classes of the pool, with images."""
        return tuple(each for each in self.classes if each.tasks and each.images)

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
    return Score(
        tuple(found),
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


def _first_error(results: Iterable[PredictionResult]) -> str:
    return next((each.error for each in results if each.error), "there are no images")
