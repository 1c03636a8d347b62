"""How good a pool is on held-out images of every task, for every matcher, read-out and classifier.

Every query comes from a table (query_table.py) in which it was computed once, in shuffled batches of mixed tasks. Every
matcher's result then follows from the table by the same scoring that serves requests, and evaluating after each of M
tasks costs M passes an image, not M squared.

Whatever a version fits on held-out images (weights, classifier, calibration) is fitted here on one half of them and
used on the other, both ways round: no image is answered by anything that its own label decided.
"""

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mqmk.learner.evaluation.answer_fit import fit_answering
from mqmk.learner.evaluation.calibration_fit import calibration_error, fit_calibration
from mqmk.learner.evaluation.fusion_fit import FusionSample, fit_fusion
from mqmk.learner.evaluation.query_table import HeldOut, QueryTable, TableQueries
from mqmk.learner.evaluation.sample import Sample
from mqmk.matcher.classifiers import READOUTS, logits
from mqmk.matcher.fusion import ClassEvidence, Pairs
from mqmk.matcher.matcher_info import CLASS_MATCHERS, EXACT
from mqmk.matcher.matchers import Match, MatchInput, MatchSettings, match_queries
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.probabilities import class_probabilities
from mqmk.matcher.regression import fit_regression

MIN_PER_CLASS: Final = 5
"""Images of a class in each half. With fewer, the noise of a half outweighs the bias of choosing and reporting on the
same images."""


@dataclass(frozen=True, eq=False)
class Halves:
    """The held-out images that choose a matcher, and those that its figures are reported on."""

    choosing: Bool[Tensor, " images"]
    reporting: Bool[Tensor, " images"]

    @property
    def overlap(self) -> bool:
        """Whether some images are on both sides, so that the reported figures may flatter the chosen matcher."""
        return bool((self.choosing & self.reporting).any())


def split_halves(held_out: HeldOut | Sample) -> Halves:
    """Every second image of each class, in the order of their hashes; copies stay together.

    The images of a task with less than MIN_PER_CLASS for a half, in the mean over its classes, are on both sides.
    """
    classes: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, (task, label) in enumerate(zip(held_out.task.tolist(), held_out.label.tolist(), strict=True)):
        classes[task][label].append(place)
    choosing, reporting = (torch.ones(len(held_out.task), dtype=torch.bool) for _ in range(2))
    for by_label in classes.values():
        if sum(map(len, by_label.values())) < 2 * MIN_PER_CLASS * len(by_label):
            continue
        for places in by_label.values():
            ids = sorted({held_out.ids[place] for place in places})
            rank = {name: number for number, name in enumerate(ids)}
            for place in places:
                (reporting if rank[held_out.ids[place]] % 2 else choosing)[place] = False
    return Halves(choosing, reporting)


@dataclass(frozen=True)
class Tally:
    """How one matcher did on held-out images; rates from 0 to 1, of a task None if it has no held-out images."""

    images: int
    matching_rate: float
    """Share of images matched to a task that knows their class."""
    accuracy: float
    """Share of images that get their own label among all classes, as a service would answer."""
    calibration_error: float
    """Expected calibration error of the probability of that answer."""
    accuracy_all: float
    accuracy_task: float
    recall_at_3: float
    """Share of images for which a task that knows their class has one of the three best scores."""
    agreement: float
    """Share of images matched to the same task as by exact matching."""
    num_queries: float
    """Mean number of queries an image."""
    task_images: tuple[int, ...]
    task_matching: tuple[float | None, ...]
    task_accuracy_all: tuple[float | None, ...]
    task_accuracy_task: tuple[float | None, ...]
    confusion: tuple[tuple[int, ...], ...]
    """Rows: true task, columns: matched task."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Everything that held-out images say about one pool. The pool is on the CPU, where the table is."""

    pool: PromptPool
    table: QueryTable
    held_out: HeldOut

    def match(self, matcher: str, settings: MatchSettings | None = None) -> Match:
        """The matches of the named matcher."""
        settings = settings or MatchSettings()
        if (matcher, settings) not in self._matches:
            pools = self._fused_pools if matcher in CLASS_MATCHERS else (self.pool, self.pool)
            found = [
                match_queries(matcher, MatchInput(TableQueries(self.table), pool, settings, self.held_out.task))
                for pool in dict.fromkeys(pools)
            ]
            self._matches[matcher, settings] = found[0] if len(found) == 1 else merge_matches(self._in_first, *found)
        return self._matches[matcher, settings]

    @cached_property
    def _in_first(self) -> Bool[Tensor, " images"]:
        """Every second image of each class, in the order of their hashes."""
        order = sorted(range(len(self.held_out.ids)), key=lambda place: self.held_out.ids[place])
        seen: Counter[tuple[int, int]] = Counter()
        first = torch.zeros(len(order), dtype=torch.bool)
        for place in order:
            of_class = int(self.held_out.task[place]), int(self.held_out.label[place])
            first[place] = seen[of_class] % 2 == 0
            seen[of_class] += 1
        return first

    @cached_property
    def _fused_pools(self) -> tuple[PromptPool, PromptPool]:
        """The pool with the weights for the first half of the images, which the second one gave, and the reverse."""
        sample = FusionSample(*self._weigh_all(), self._is_true)
        weights = [fit_fusion(sample.among(half)) for half in (~self._in_first, self._in_first)]
        return tuple(self.pool.with_matching({**self.pool.matching, "fusion": asdict(each)}) for each in weights)  # type: ignore[return-value]

    def _weigh_all(self) -> tuple[Tensor, ClassEvidence]:
        """What the regression says, and exact queries of the shortlist that it draws up."""
        values = fit_regression(self.pool).values(self.table.anchor)
        pairs = Pairs.of_shortlist(self.pool, values, MatchSettings().shortlist)
        evidence = ClassEvidence.empty(values)
        evidence.add(self.pool, pairs, self.table.task_queries[pairs.image, pairs.task])
        return values, evidence

    @cached_property
    def _is_true(self) -> Bool[Tensor, "images rows"]:
        """The head rows of each image's label; several tasks may know it."""
        return self._label_of_row[self.true_row][:, None] == self._label_of_row[None]

    def answer(self, matcher: str) -> tuple[Bool[Tensor, " images"], Float[Tensor, " images"]]:
        """Which images a service would answer with their own label, and the probability of each answer."""
        found = self.match(matcher)
        right, probability = torch.zeros(len(found.task), dtype=torch.bool), torch.zeros(len(found.task))
        for here in (self._in_first, ~self._in_first):
            if not here.any():
                continue
            pool = self.pool if matcher in CLASS_MATCHERS else self._calibrated_pool(matcher, found, ~here)
            best = class_probabilities(pool, matcher, take_images(found, here)).max(dim=1)
            right[here], probability[here] = self._is_true[here].gather(1, best.indices[:, None])[:, 0], best.values
        return right, probability

    def _calibrated_pool(self, matcher: str, found: Match, among: Bool[Tensor, " images"]) -> PromptPool:
        """The pool with what some images say about the answers of a matcher."""
        if not among.any():
            return self.pool
        some, matched = take_images(found, among), self.is_matched(found)[among]
        calibration = fit_calibration(some.score, some.margin, matched)
        answering = fit_answering(self.pool, some, matched, self._is_true[among])
        fitted = {"calibration": {matcher: asdict(calibration)}, "answers": {matcher: asdict(answering)}}
        return self.pool.with_matching({**self.pool.matching, **fitted})

    @cached_property
    def _matches(self) -> dict[tuple[str, MatchSettings], Match]:
        return {}

    def tally(
        self,
        matcher: str,
        settings: MatchSettings | None = None,
        classifier: str = "fc",
        among: Bool[Tensor, " images"] | None = None,
    ) -> Tally:
        """How the named matcher did, on all images or on some."""
        found = self.match(matcher, settings)
        among = torch.ones_like(self.held_out.task, dtype=torch.bool) if among is None else among
        matched = self.is_matched(found)
        correct = {way: self.is_correct(found, classifier, way) for way in READOUTS}
        exact = self.match(EXACT, settings).task
        usual = settings is None or settings == MatchSettings()
        answered, probability = self.answer(matcher) if usual else (correct["task"], None)
        return Tally(
            images=int(among.sum()),
            matching_rate=_share(matched[among]),
            accuracy=_share(answered[among]),
            calibration_error=0.0 if probability is None else calibration_error(probability[among], answered[among]),
            accuracy_all=_share(correct["all"][among]),
            accuracy_task=_share(correct["task"][among]),
            recall_at_3=_share(self._is_in_top(found, 3)[among]),
            agreement=_share((found.task == exact)[among]),
            num_queries=found.num_queries[among].float().mean().item(),
            task_images=tuple(int((among & here).sum()) for here in self._images_of_task),
            task_matching=self._by_task(matched, among),
            task_accuracy_all=self._by_task(correct["all"], among),
            task_accuracy_task=self._by_task(correct["task"], among),
            confusion=self._confusion(found.task, among),
        )

    def is_matched(self, found: Match) -> Bool[Tensor, " images"]:
        """Which images were matched to a task that knows their class."""
        return self._knows[found.task, self._label_of_row[self.true_row]]

    def _is_in_top(self, found: Match, number: int) -> Bool[Tensor, " images"]:
        """Which images have a task that knows their class among the best scores; tasks without a score do not count."""
        best = found.scores.topk(min(number, found.scores.shape[1]), dim=1)
        known = self._knows[best.indices, self._label_of_row[self.true_row][:, None]]
        return (known & best.values.isfinite()).any(dim=1)

    def is_correct(self, found: Match, classifier: str, readout: str) -> Bool[Tensor, " images"]:
        """Which images got their own label; a label that several tasks know counts whichever task gave it."""
        rows = logits(self.pool, found, classifier, readout).argmax(dim=1)
        return self._label_of_row[rows] == self._label_of_row[self.true_row]

    @cached_property
    def _label_of_row(self) -> Int[Tensor, " rows"]:
        """A number for the label of every head row; rows of the same label have the same one."""
        numbers: dict[str, int] = {}
        return torch.tensor([numbers.setdefault(label, len(numbers)) for _, label in self.pool.labels])

    @cached_property
    def _knows(self) -> Bool[Tensor, "tasks labels"]:
        """Which task knows which label."""
        known = torch.zeros(len(self.pool.tasks), len(self._label_of_row), dtype=torch.bool)
        known[self.pool.row_task, self._label_of_row] = True
        return known

    @property
    def true_row(self) -> Int[Tensor, " images"]:
        """The head row of each image's true class."""
        sizes = torch.tensor([0, *(len(task.classes) for task in self.pool.tasks)])
        return sizes.cumsum(0)[self.held_out.task] + self.held_out.label

    @cached_property
    def _images_of_task(self) -> tuple[Bool[Tensor, " images"], ...]:
        return tuple(self.held_out.task == task for task in range(len(self.pool.tasks)))

    def _by_task(self, good: Bool[Tensor, " images"], among: Bool[Tensor, " images"]) -> tuple[float | None, ...]:
        parts = (good[here & among] for here in self._images_of_task)
        return tuple(_share(part) if len(part) else None for part in parts)

    def _confusion(
        self, matched: Int[Tensor, " images"], among: Bool[Tensor, " images"]
    ) -> tuple[tuple[int, ...], ...]:
        tasks = len(self.pool.tasks)
        pairs = torch.bincount((self.held_out.task * tasks + matched)[among], minlength=tasks * tasks)
        return tuple(tuple(row) for row in pairs.reshape(tasks, tasks).tolist())


def take_images(found: Match, images: Bool[Tensor, " images"]) -> Match:
    """The matches of some images."""
    values: dict[str, Any] = {name: getattr(found, name) for name in Match.__dataclass_fields__}
    taken: dict[str, Any] = {name: None if value is None else value[images] for name, value in values.items()}
    return Match(**taken)


def merge_matches(in_first: Bool[Tensor, " images"], first: Match, second: Match) -> Match:
    """The first match of some images, the second of the others."""
    merged: dict[str, Any] = {}
    for name in Match.__dataclass_fields__:
        one, other = getattr(first, name), getattr(second, name)
        choose = in_first.reshape(-1, *[1] * (one.ndim - 1)) if one is not None else None
        merged[name] = None if choose is None else torch.where(choose, one, other)
    return Match(**merged)


def _share(good: Bool[Tensor, " images"]) -> float:
    return good.float().mean().item() if len(good) else 0.0
