"""What the HTTP answers look like, for the OpenAPI document, and how they are made from answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, Field

from mqmk.deploy.pool_holder import Held
from mqmk.deploy.service import CHOICES, Answered


class ErrorBody(BaseModel):
    """What every error looks like."""

    error: str


class TaskScore(BaseModel):
    """How well one task's prompt fits."""

    task: str
    score: float


class MatchBody(BaseModel):
    """Which task's prompt fits, and how clearly."""

    score: float
    margin: float | None
    runner_up: str | None
    unknown: bool | None
    scores: list[TaskScore] | None = None


class TopBody(BaseModel):
    """One of the best classes."""

    label: str
    task: str
    probability: float


class AnswerBody(BaseModel):
    """What the service says about one picture."""

    id: str
    label: str
    probability: float
    task: str
    match: MatchBody
    top: list[TopBody]
    pool_version: int
    matcher: str
    queries: int


class TaskBody(BaseModel):
    """A task that was learned."""

    name: str
    classes: list[str]
    samples: int
    trained_at: str
    metrics: dict[str, Any]


class PoolBody(BaseModel):
    """What has been learned so far; `pool_version` is null before the first task."""

    pool_version: int | None
    digest: str | None
    backbone: str
    matcher: str
    """What is taken unless a request names another; `auto` is told as what it means for this pool."""
    matchers: list[str]
    """What a request may name."""
    classes: int
    tasks: list[TaskBody]
    matching: dict[str, Any]


LABEL_LENGTH: Final = 1000


class FeedbackIn(BaseModel):
    """The true label of an answer."""

    id: str = Field(min_length=1, max_length=LABEL_LENGTH)
    label: str = Field(min_length=1, max_length=LABEL_LENGTH)


class FeedbackBody(BaseModel):
    """What the true label says about the answer."""

    id: str
    label: str
    correct: bool
    matched: bool | None
    task: str
    pool_version: int
    counted: bool


def answer_body(answered: Answered, with_scores: bool) -> dict[str, Any]:
    """As design and AnswerBody say; built by hand, because it is made for every request."""
    found = answered.prediction
    match: dict[str, Any] = {
        "score": found.score,
        "margin": found.margin,
        "runner_up": found.runner_up,
        "unknown": answered.unknown,
    }
    if with_scores:
        match["scores"] = [{"task": task, "score": score} for task, score in answered.scores]
    return {
        "id": answered.id,
        "label": found.label,
        "probability": found.probability,
        "task": found.task,
        "match": match,
        "top": [{"label": row.label, "task": row.task, "probability": row.probability} for row in found.top],
        "pool_version": answered.pool_version,
        "matcher": found.matcher,
        "queries": found.queries,
    }


def answers_body(answers: Sequence[Answered], with_scores: bool) -> dict[str, Any] | list[dict[str, Any]]:
    """One picture gives one answer, several give a list."""
    bodies = [answer_body(answer, with_scores) for answer in answers]
    return bodies[0] if len(bodies) == 1 else bodies


def _matching(matching: Mapping[str, Any]) -> dict[str, Any]:
    """Without the reference of drift: a histogram or two for every task, which only replicas read."""
    return {name: value for name, value in matching.items() if name != "reference"}


def pool_body(held: Held | None, backbone: str, matcher: str) -> dict[str, Any]:
    """What GET /pool says."""
    tasks = held.pool.tasks if held else ()
    return {
        "pool_version": held.version if held else None,
        "digest": held.pointer.digest if held else None,
        "backbone": backbone,
        "matcher": held.auto if held and matcher == "auto" else matcher,
        "matchers": list(CHOICES),
        "classes": len({name for task in tasks for name in task.classes}),
        "tasks": [
            {
                "name": task.name,
                "classes": list(task.classes),
                "samples": task.samples,
                "trained_at": task.trained_at,
                "metrics": dict(task.metrics),
            }
            for task in tasks
        ],
        "matching": _matching(held.pool.matching) if held else {},
    }
