"""Match a sample of held-out images with every matcher of a service, for a bounded number of queries.

Pairs of image and prompt that earlier versions recorded are not computed again. What is new in a version: Q+, the new
prompt for images that are matched exactly, shortlists that changed, and everything about images that are new in the
sample. Q+ is another one in every version, and exact matchers need a query for every task: where the pool can be served
without them, both are measured on a quarter of the sample. Exact matchers are measured on the images whose rows are
complete; a build completes only so many, and later builds go on.

Scores and decisions are those of `matcher/matchers.py` with default settings. Each is taken once, here: whatever needs
it later must not depend on how a matrix product was rounded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from mqmk.learner.evaluation.sample import Sample
from mqmk.learner.evaluation.score_records import ScoreRecords, name_records, take_over
from mqmk.matcher.fusion import Pairs
from mqmk.matcher.images import normalise
from mqmk.matcher.keys import max_by_task, plain_keys, trained_keys
from mqmk.matcher.matcher_info import CLASS_MATCHERS, EXACT, PLAIN_MATCHERS
from mqmk.matcher.matchers import MatchSettings, shortlist_tasks, to_match
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT, Stem
from mqmk.matcher.queries import rows_per_pass
from mqmk.matcher.regression import fit_regression

BATCH: Final = 64
SHORTLIST: Final = MatchSettings().shortlist
ALL_TASKS: Final = frozenset({"mqsk", EXACT})
"""Matchers that need a query for every task."""
ENHANCED: Final = frozenset({"mqmk-ei", "cascade"})
"""Matchers that need Q+."""
ROW_QUERIES: Final = 4
"""A build computes at most this many queries for each image of its sample to complete rows."""
ROW_PAIRS: Final = 1000
"""Complete rows hold at most this many pairs for each image of the sample: with more tasks they are fewer images."""

ReadPixels = Callable[[Int[Tensor, " some"]], UInt8[Tensor, "some 3 height width"]]
"""The pixels of some images of a sample, by their places in it."""


@dataclass(frozen=True)
class RowBudget:
    """How much a build may spend on exact matching."""

    queries: int
    """Computed to complete rows, or those of one row if that is more."""
    pairs: int
    """In all complete rows."""
    images: int
    """That Q+ is computed for."""

    @classmethod
    def of(cls, max_images: int) -> "RowBudget":
        """To measure a version on a sample of at most this many images."""
        return cls(ROW_QUERIES * max_images, ROW_PAIRS * max_images, max_images)


NO_ROWS: Final = RowBudget(0, 0, 10**9)


@dataclass(frozen=True, eq=False)
class SampleMatch:
    """What one matcher answers for those images of a sample on which it was measured."""

    image: Int[Tensor, " images"]
    task: Int[Tensor, " images"]
    score: Float[Tensor, " images"]
    margin: Float[Tensor, " images"]
    best: Int[Tensor, "images most"]
    """The tasks with the three best scores; -1 where fewer were scored."""
    num_queries: Int[Tensor, " images"]
    answer: Int[Tensor, " images"]
    """The class within the matched task."""
    probability: Float[Tensor, " images"]
    """That the answer is right."""


SampleMatches = dict[str, SampleMatch]
NOT_ANSWERED: Final = -1
"""In the place of an answer, until `sample_answers.py` chooses a classifier."""


@torch.inference_mode()
def match_sample(
    vit: FrozenViT,
    pool: PromptPool,
    sample: Sample,
    read_pixels: ReadPixels,
    matchers: Sequence[str],
    known: ScoreRecords | None = None,
    budget: RowBudget = NO_ROWS,
) -> tuple[ScoreRecords, SampleMatches]:
    """What the named matchers match, and records for the next version. The pool is on the CPU, as all scores are.

    Those that weigh all classes are not among the matches: `weigh_classes` makes theirs from the records.
    """
    records = take_over(known, name_records(pool, sample.ids), vit.dim)
    to_complete = _choose_rows(records, budget)
    live = pool.to(vit.device)
    parts: dict[str, list[SampleMatch]] = {name: [] for name in matchers if name not in CLASS_MATCHERS}
    for rows in torch.arange(len(sample)).split(BATCH) if len(sample) else ():
        batch = _LiveBatch(vit, live, read_pixels, rows)
        here = [name for name in matchers if name not in ENHANCED or int(rows[0]) < budget.images]
        own, cheap = sample.task[rows], _score_cheaply(pool, records, batch, here)
        wanted = to_complete[rows][:, None].repeat(1, len(pool.tasks))
        for name in here:
            if name not in ALL_TASKS and name != "anchor":
                wanted.scatter_(1, _exact_tasks(name, cheap, own), True)
        image, task = (wanted & records.lacks[rows]).nonzero(as_tuple=True)
        if len(image):
            records.record(pool, Pairs(rows[image], task), batch.task_queries(image, task))
        for name in here:
            if name in parts:
                parts[name].append(_match(name, records, rows, cheap, own))
    return records, {name: _join(found) for name, found in parts.items() if found}


def _choose_rows(records: ScoreRecords, budget: RowBudget) -> Bool[Tensor, " images"]:
    """The rows to complete: those that lack least, and among equals the first."""
    images, tasks = records.task_scores.shape
    chosen = torch.zeros(images, dtype=torch.bool)
    if budget.queries and tasks:
        missing, order = records.lacks.sum(dim=1).sort(stable=True)
        affordable = missing.cumsum(0) <= max(budget.queries, tasks)
        chosen[order[affordable][: max(1, min(budget.pairs // tasks, budget.images))]] = True
    return chosen


@dataclass(frozen=True, eq=False)
class _LiveBatch:
    """The queries of a few images; pixels are read only if one is asked for."""

    vit: FrozenViT
    pool: PromptPool
    read_pixels: ReadPixels
    rows: Int[Tensor, " batch"]

    @cached_property
    def _embedded(self) -> Stem:
        return self.vit.embed(normalise(self.read_pixels(self.rows).to(self.vit.device), self.vit.info))

    @cached_property
    def _stem(self) -> Stem:
        return self.vit.stem(self._embedded, self.pool.g, self.pool.e_layers[0])

    def plain(self, image: Int[Tensor, " some"]) -> Float[Tensor, "some dim"]:
        return self.vit.query(self._embedded.rows(image.to(self.vit.device))).cpu()

    def enhanced(self, image: Int[Tensor, " some"]) -> Float[Tensor, "some dim"]:
        return self.vit.query(self._stem.rows(image.to(self.vit.device)), self.pool.g, self.pool.mean_e).cpu()

    def anchor(self, image: Int[Tensor, " some"]) -> Float[Tensor, "some dim"]:
        return self.vit.query(self._stem.rows(image.to(self.vit.device)), self.pool.g, self.pool.anchor_prompt).cpu()

    def task_queries(self, image: Int[Tensor, " pairs"], task: Int[Tensor, " pairs"]) -> Float[Tensor, "pairs dim"]:
        """Q_t of some pairs; those of one task beside each other share its prompt."""
        size = rows_per_pass(self.vit, None)
        order = task.argsort(stable=True)
        numbers, counts = task[order].unique_consecutive(return_counts=True)
        found = torch.empty(len(task), self.vit.dim)
        alone: list[Tensor] = []
        for number, pairs in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            if len(pairs) < size // 2:
                alone.append(pairs)
                continue
            stem = self._stem.rows(image[pairs].to(self.vit.device))
            found[pairs] = self.vit.query(stem, self.pool.g, self.pool.e(number)).cpu()
        for pairs in torch.cat(alone).split(size) if alone else ():
            stem = self._stem.rows(image[pairs].to(self.vit.device))
            found[pairs] = self.vit.query(stem, self.pool.g, self.pool.e_rows(task[pairs])).cpu()
        return found


def _score_cheaply(
    pool: PromptPool, records: ScoreRecords, batch: _LiveBatch, matchers: Sequence[str]
) -> dict[str, Float[Tensor, "batch tasks"]]:
    """S_t of one query for all tasks, by matcher; queries that are not recorded yet are computed."""
    scores: dict[str, Float[Tensor, "batch tasks"]] = {}
    for name in matchers:
        if name in PLAIN_MATCHERS:
            query = _complete(records.plain, batch.rows, batch.plain)
            scores[name] = plain_keys(pool, 1 if name == "sqsk" else None).scores(query, top_keys=1)
        elif name in ENHANCED:
            query = _complete(records.enhanced, batch.rows, batch.enhanced)
            scores[name] = trained_keys(pool, None).scores(query, top_keys=1)
        elif name in CLASS_MATCHERS:
            query = _complete(records.anchor, batch.rows, batch.anchor)
            scores[name] = max_by_task(fit_regression(pool).values(query), pool.row_task, len(pool.tasks))
    return scores


def _complete(
    queries: Float[Tensor, "images dim"],
    rows: Int[Tensor, " batch"],
    compute: Callable[[Int[Tensor, " some"]], Float[Tensor, "some dim"]],
) -> Float[Tensor, "batch dim"]:
    lacking = queries[rows].isnan().any(dim=1).nonzero()[:, 0]
    if len(lacking):
        queries[rows[lacking]] = compute(lacking)
    return queries[rows]


def _exact_tasks(
    matcher: str, cheap: dict[str, Float[Tensor, "batch tasks"]], own: Int[Tensor, " batch"]
) -> Int[Tensor, "batch some"]:
    """The tasks whose own query a matcher needs."""
    if matcher == "perfect":
        return own[:, None]
    return shortlist_tasks(cheap[matcher], SHORTLIST if matcher in ("cascade", "fused") else 1)


def _match(
    matcher: str,
    records: ScoreRecords,
    rows: Int[Tensor, " batch"],
    cheap: dict[str, Float[Tensor, "batch tasks"]],
    own: Int[Tensor, " batch"],
) -> SampleMatch:
    """By the recorded scores, for the images for which there are enough."""
    exact = records.class_scores(rows)
    if matcher in ALL_TASKS:
        here = ~exact.isnan().any(dim=1)
        rows, scores, cost = (
            rows[here],
            (exact if matcher == EXACT else records.task_scores[rows])[here],
            exact.shape[1],
        )
    elif matcher in ("cascade", "perfect"):
        some = _exact_tasks(matcher, cheap, own)
        scores = torch.full_like(exact, -torch.inf).scatter(1, some, exact.gather(1, some))
        cost = 1 if matcher == "perfect" else 1 + some.shape[1]
    else:
        scores, cost = cheap[matcher], 2
    found = to_match(scores, torch.zeros(len(scores), 0), cost)
    best = scores.topk(min(3, scores.shape[1]), dim=1)
    ranked = best.indices.where(best.values.isfinite(), -1)
    unanswered = torch.full_like(found.task, NOT_ANSWERED)
    return SampleMatch(
        rows, found.task, found.score, found.margin, ranked, found.num_queries, unanswered, torch.zeros(len(rows))
    )


def _join(parts: Sequence[SampleMatch]) -> SampleMatch:
    fields = SampleMatch.__dataclass_fields__
    return SampleMatch(*(torch.cat([getattr(part, name) for part in parts]) for name in fields))
