"""From images to named answers: match, classify, and say how sure and how expensive it was."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.matcher.classifiers import logits
from mqmk.matcher.errors import MatchError
from mqmk.matcher.matchers import MATCHERS, NOBODY, Match, MatchSettings, Scene, decide, match
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.prompted_vit import FrozenViT
from mqmk.matcher.queries import Queries

AUTO: Final = "auto"


@dataclass(frozen=True)
class PredictSettings:
    """How the service answers unless a request says otherwise."""

    matcher: str = AUTO
    """A matcher's name, or `auto`: the best matching rate on held-out data within `budget`."""
    budget: float = 4.0
    """`auto` takes no matcher that costs more than this many queries an image."""
    classifier: str = "fc"
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
    """What the service says about one image."""

    label: str
    probability: float
    task: str
    score: float
    runner_up: str | None
    margin: float | None
    top: tuple[Answer, ...]
    matcher: str
    queries: int


@dataclass(frozen=True)
class Predicted:
    """A batch as tensors, for evaluation."""

    matcher: str
    match: Match
    probabilities: Float[Tensor, "batch rows"]


def choose_matcher(pool: PromptPool, budget: float, shortlist: int) -> str:
    """The matcher that `auto` means for this pool.

    Takes the best held-out matching rate that the pool reports within the budget, the cheaper one of equals. A pool
    that reports none is matched exactly while that is affordable, by `cascade` or `mqmk-ei` after.
    """
    measured: Mapping[str, Mapping[str, float]] = pool.matching.get("matchers", {})
    affordable = {
        name: row for name, row in measured.items() if name in MATCHERS and name != "perfect" and row["cost"] <= budget
    }
    if affordable:
        return max(affordable, key=lambda name: (affordable[name]["rate"], -affordable[name]["cost"]))
    if len(pool.tasks) <= budget:
        return "mqmk"
    return "cascade" if 1 + shortlist <= budget else "mqmk-ei"


@torch.inference_mode()
def predict(
    vit: FrozenViT,
    pool: PromptPool,
    images: Float[Tensor, "batch 3 height width"],
    settings: PredictSettings | None = None,
    true_task: Int[Tensor, " batch"] | None = None,
) -> Predicted:
    """Match and classify a batch. An image's answer does not depend on the images beside it."""
    if not len(images):
        raise MatchError("expected at least one image")
    settings = settings or PredictSettings()
    name = settings.matcher
    if name == AUTO:
        name = choose_matcher(pool, settings.budget, settings.match.shortlist)
    if pool.backbone != vit.info:
        raise MatchError(f"the pool was trained on {pool.backbone.name}, not on {vit.info.name} with these weights")
    return _classified(name, pool, match(name, vit, pool, images, settings.match, true_task), settings)


@torch.inference_mode()
def predict_from(queries: Queries, pool: PromptPool, matcher: str, settings: PredictSettings) -> Predicted:
    """As `predict` by a named matcher, wherever the queries come from."""
    return _classified(matcher, pool, decide(matcher, Scene(queries, pool, settings.match)), settings)


def _classified(matcher: str, pool: PromptPool, found: Match, settings: PredictSettings) -> Predicted:
    return Predicted(matcher, found, logits(pool, found, settings.classifier, settings.readout).softmax(dim=1))


def name_answers(pool: PromptPool, predicted: Predicted, top_k: int = 5) -> list[Prediction]:
    """The answers in words, one for each image. A label that several tasks know counts once, with their sum."""
    return [_named(pool, predicted, image, top_k) for image in range(len(predicted.probabilities))]


def _named(pool: PromptPool, predicted: Predicted, image: int, top_k: int) -> Prediction:
    found = predicted.match
    by_label: dict[str, tuple[float, float, str]] = {}  # label -> sum, largest part, the task that gave it
    probabilities = predicted.probabilities[image].tolist()
    for (number, label), probability in zip(pool.labels, probabilities, strict=True):
        total, largest, task = by_label.get(label, (0.0, -1.0, ""))
        if probability > largest:
            largest, task = probability, pool.tasks[number].name
        by_label[label] = (total + probability, largest, task)
    answers = [Answer(label, task, total) for label, (total, _, task) in by_label.items() if total > 0]
    top = sorted(answers, key=lambda answer: -answer.probability)[:top_k]
    runner_up = int(found.runner_up[image])
    alone = runner_up == NOBODY
    return Prediction(
        label=top[0].label,
        probability=top[0].probability,
        task=pool.tasks[int(found.task[image])].name,
        score=float(found.score[image]),
        runner_up=None if alone else pool.tasks[runner_up].name,
        margin=None if alone else float(found.margin[image]),
        top=tuple(top),
        matcher=predicted.matcher,
        queries=int(found.queries[image]),
    )
