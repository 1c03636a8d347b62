"""From images to predictions: match, classify, and state confidence and cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.matcher.errors import MatchError
from mqmk.matcher.matcher_info import AUTO, EXACT, MATCHER_INFO
from mqmk.matcher.matchers import NO_RUNNER_UP, Match, MatchInput, MatchSettings, match_images, match_queries
from mqmk.matcher.pool import PromptPool, cache_on_pool
from mqmk.matcher.probabilities import class_probabilities
from mqmk.matcher.prompted_vit import FrozenViT
from mqmk.matcher.queries import Queries


@dataclass(frozen=True)
class PredictSettings:
    """How the service answers unless a request says otherwise."""

    matcher: str = AUTO
    """A matcher's name, or `auto`: the best accuracy on held-out data within `budget`."""
    budget: float = 4.0
    """`auto` takes no matcher that costs more than this many queries an image."""
    classifier: str = AUTO
    """A classifier's name, or `auto`: the best accuracy on held-out data."""
    readout: str = "task"
    match: MatchSettings = field(default_factory=MatchSettings)


@dataclass(frozen=True)
class Answer:
    """The probability of one class."""

    label: str
    task: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """The predicted class of one image, and how it was found."""

    label: str
    probability: float
    task: str
    score: float
    runner_up: str | None
    margin: float | None
    top: tuple[Answer, ...]
    matcher: str
    num_queries: int


@dataclass(frozen=True)
class Predicted:
    """A batch as tensors, for evaluation."""

    matcher: str
    match: Match
    probabilities: Float[Tensor, "batch rows"]


def choose_matcher(pool: PromptPool, budget: float, shortlist: int) -> str:
    """The matcher that `auto` means for this pool.

    The one with the best held-out accuracy within the budget; of equals, the cheaper one. A pool without measured
    accuracies is matched exactly while the budget allows it, then answered by `fused` if it has an anchor, else by
    `cascade` or `mqmk-ei`.
    """
    measured: Mapping[str, Mapping[str, float]] = pool.matching.get("matchers", {})
    usable = {name for name, info in MATCHER_INFO.items() if info.needs != "true task"}
    affordable = {name: row for name, row in measured.items() if name in usable and row["cost"] <= budget}
    if affordable:
        return max(affordable, key=lambda name: (affordable[name]["accuracy"], -affordable[name]["cost"]))
    if len(pool.tasks) <= budget:
        return EXACT
    if pool.has_statistics and 1 + shortlist <= budget:
        return "fused"
    return "cascade" if 1 + shortlist <= budget else "mqmk-ei"


@torch.inference_mode()
def predict(
    vit: FrozenViT,
    pool: PromptPool,
    images: Float[Tensor, "batch 3 height width"],
    settings: PredictSettings | None = None,
    true_task: Int[Tensor, " batch"] | None = None,
) -> Predicted:
    """Match and classify a batch, on the backbone's device. An image's answer does not depend on those beside it."""
    if not len(images):
        raise MatchError("expected at least one image")
    settings = settings or PredictSettings()
    name = settings.matcher
    if name == AUTO:
        name = choose_matcher(pool, settings.budget, settings.match.shortlist)
    if pool.backbone != vit.info:
        raise MatchError(f"the pool was trained on {pool.backbone.name}, not on {vit.info.name} with these weights")
    found = match_images(name, vit, pool, images.to(vit.device), settings.match, true_task)
    return _classify(name, pool, found, settings)


@torch.inference_mode()
def predict_from(queries: Queries, pool: PromptPool, matcher: str, settings: PredictSettings) -> Predicted:
    """As `predict` with a named matcher, wherever the queries come from."""
    return _classify(matcher, pool, match_queries(matcher, MatchInput(queries, pool, settings.match)), settings)


def _classify(matcher: str, pool: PromptPool, found: Match, settings: PredictSettings) -> Predicted:
    return Predicted(matcher, found, class_probabilities(pool, matcher, found, settings.classifier, settings.readout))


def name_answers(pool: PromptPool, predicted: Predicted, top_k: int = 5) -> list[Prediction]:
    """One prediction for each image. A label that several tasks know counts once, with the sum of its probabilities."""
    return [_name_answer(pool, predicted, image, top_k) for image in range(len(predicted.probabilities))]


@dataclass(frozen=True)
class _Labels:
    """The distinct labels of a pool."""

    names: tuple[str, ...]
    of_row: Int[Tensor, " rows"]
    """The label of each head row."""
    rows: tuple[tuple[int, ...], ...]
    """The head rows of each label."""


@cache_on_pool
def _number_labels(pool: PromptPool) -> _Labels:
    rows: dict[str, list[int]] = {}
    for row, (_, label) in enumerate(pool.labels):
        rows.setdefault(label, []).append(row)
    numbers = {label: number for number, label in enumerate(rows)}
    of_row = torch.tensor([numbers[label] for _, label in pool.labels])
    return _Labels(tuple(rows), of_row, tuple(map(tuple, rows.values())))


def _name_best(pool: PromptPool, probabilities: Float[Tensor, " rows"], top_k: int) -> list[Answer]:
    """The best labels, each with the task that gave the largest part; only these few are named."""
    labels = _number_labels(pool)
    totals = torch.zeros(len(labels.names), dtype=torch.float64).index_add(0, labels.of_row, probabilities)
    least = totals.topk(min(top_k, len(totals))).values[-1]
    some = ((totals >= least) & (totals > 0)).nonzero()[:, 0]
    best = some[totals[some].argsort(descending=True, stable=True)][:top_k]
    answers = []
    for number, total in zip(best.tolist(), totals[best].tolist(), strict=True):
        rows = labels.rows[number]
        row = rows[0] if len(rows) == 1 else rows[int(probabilities[list(rows)].argmax())]
        answers.append(Answer(labels.names[number], pool.tasks[pool.labels[row][0]].name, total))
    return answers


def _name_answer(pool: PromptPool, predicted: Predicted, image: int, top_k: int) -> Prediction:
    found = predicted.match
    top = _name_best(pool, predicted.probabilities[image].double().cpu(), top_k)
    runner_up = int(found.runner_up[image])
    alone = runner_up == NO_RUNNER_UP
    return Prediction(
        label=top[0].label,
        probability=top[0].probability,
        task=pool.tasks[int(found.task[image])].name,
        score=float(found.score[image]),
        runner_up=None if alone else pool.tasks[runner_up].name,
        margin=None if alone else float(found.margin[image]),
        top=tuple(top),
        matcher=predicted.matcher,
        num_queries=int(found.num_queries[image]),
    )
