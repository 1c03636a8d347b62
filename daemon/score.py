"""How good are answers about pictures whose class is known? Counted class by class."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mqmk.daemon.errors import DaemonError
from mqmk.daemon.told import Told


@dataclass(frozen=True)
class ClassScore:
    """The answers about the pictures of one class."""

    label: str
    tasks: tuple[str, ...]
    """Those that know the class; none if it was never learned."""
    pictures: int
    """That were answered."""
    right: int
    """Got their own label."""
    matched: int
    """Got the prompt of a task that knows their class."""
    unknown: int | None
    """Looked like nothing the pool knows; None if the pool cannot tell."""
    mistaken_for: str | None
    """The label that the others got most often."""

    @property
    def accuracy(self) -> float | None:
        """None without pictures, and for a class that was never learned: no answer could be right."""
        return self.right / self.pictures if self.pictures and self.tasks else None

    @property
    def matching_rate(self) -> float | None:
        """As accuracy."""
        return self.matched / self.pictures if self.pictures and self.tasks else None

    @property
    def unknown_share(self) -> float | None:
        """None without pictures, or if the pool cannot tell."""
        return self.unknown / self.pictures if self.pictures and self.unknown is not None else None


@dataclass(frozen=True)
class Score:
    """The answers about all pictures. Accuracy and matching rate are of classes that were learned."""

    classes: tuple[ClassScore, ...]
    versions: tuple[int, ...]
    """Of the pool; more than one if a new one was swapped in meanwhile."""
    matchers: tuple[str, ...]

    @property
    def learned(self) -> tuple[ClassScore, ...]:
        """The classes that could be answered."""
        return tuple(each for each in self.classes if each.tasks and each.pictures)

    @property
    def strangers(self) -> tuple[ClassScore, ...]:
        """Classes that the pool does not know."""
        return tuple(each for each in self.classes if not each.tasks and each.pictures)

    @property
    def pictures(self) -> int:
        """Of classes that were learned."""
        return sum(each.pictures for each in self.learned)

    @property
    def accuracy(self) -> float:
        """Share of pictures with their own label."""
        return sum(each.right for each in self.learned) / self.pictures

    @property
    def accuracy_by_class(self) -> float:
        """The mean over classes, which small classes count in as much as large ones."""
        return fmean(each.right / each.pictures for each in self.learned)

    @property
    def matching_rate(self) -> float:
        """Share of pictures that were answered with the prompt of their own task."""
        return sum(each.matched for each in self.learned) / self.pictures

    @property
    def unknown_share(self) -> float | None:
        """Share of pictures of learned classes that looked like nothing known: false alarms."""
        return unknown_share(self.learned)


def unknown_share(classes: Sequence[ClassScore]) -> float | None:
    """Share of the pictures of some classes that looked like nothing known; None if the pool cannot tell."""
    counts = [each.unknown for each in classes if each.unknown is not None]
    return sum(counts) / sum(each.pictures for each in classes) if len(counts) == len(classes) else None


def owners_of(classes: Iterable[str], tasks: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The tasks that know each class; DaemonError if none of the classes was learned."""
    owners = {label: tuple(name for name, known in tasks.items() if label in known) for label in classes}
    if tasks and not any(owners.values()):
        learned = [label for known in tasks.values() for label in known]
        raise DaemonError(f"expected folders named after learned classes ({_some(learned)}), got {_some(owners)}")
    return owners


def scored(classes: Mapping[str, Sequence[Path]], owners: Mapping[str, tuple[str, ...]], told: Iterable[Told]) -> Score:
    """Count; DaemonError if no picture of a class that was learned got an answer."""
    by_file = {each.file: each for each in told}
    found = [_class(label, owners[label], [by_file[file] for file in files]) for label, files in classes.items()]
    answers = [each.answer for each in by_file.values() if each.answer is not None]
    score = Score(
        tuple(found),
        tuple(sorted({answer["pool_version"] for answer in answers})),
        tuple(sorted({answer["matcher"] for answer in answers})),
    )
    if not score.learned:
        raise DaemonError(f"no picture of a learned class got an answer: {_reason(by_file.values())}")
    return score


def _class(label: str, tasks: tuple[str, ...], told: Sequence[Told]) -> ClassScore:
    answers = [each.answer for each in told if each.answer is not None]
    unknown = [answer["match"]["unknown"] for answer in answers]
    wrong = Counter(answer["label"] for answer in answers if answer["label"] != label)
    return ClassScore(
        label=label,
        tasks=tasks,
        pictures=len(answers),
        right=len(answers) - wrong.total(),
        matched=sum(answer["task"] in tasks for answer in answers),
        unknown=None if None in unknown else sum(unknown),
        mistaken_for=wrong.most_common(1)[0][0] if wrong else None,
    )


def _some(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def _reason(told: Iterable[Told]) -> str:
    return next((each.error for each in told if each.error), "there was none")
