"""The answer about one image: what `POST /predict` returns and `predict --local` prints. Imports no FastAPI.

The dataclasses are the only description: names and order of JSON fields, and the schemas of the OpenAPI document.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mqmk.matcher.predictor import Prediction


@dataclass(frozen=True)
class TaskScore:
    """How well one task's prompt fits."""

    task: str
    score: float


@dataclass(frozen=True)
class MatchBody:
    """Which task's prompt fits, and how clearly."""

    score: float
    margin: float | None
    runner_up: str | None
    unknown: bool | None
    """Whether the image looks like nothing the pool knows; None if the pool was not calibrated for it."""
    scores: tuple[TaskScore, ...] | None = None
    """Of every task that was scored, the best first; None, and absent in JSON, unless they were requested."""


@dataclass(frozen=True)
class TopBody:
    """One of the best classes."""

    label: str
    task: str
    probability: float


@dataclass(frozen=True)
class AnswerBody:
    """The answer about one image."""

    id: str
    label: str
    probability: float
    task: str
    match: MatchBody
    top: tuple[TopBody, ...]
    pool_version: int
    matcher: str
    queries: int


def make_answer(
    answer_id: str,
    prediction: Prediction,
    pool_version: int,
    unknown: bool | None,
    scores: Sequence[tuple[str, float]] | None = None,
) -> AnswerBody:
    """The answer that a prediction gives; `unknown` is None if the pool was not calibrated for it."""
    every = None if scores is None else tuple(TaskScore(task, score) for task, score in scores)
    return AnswerBody(
        id=answer_id,
        label=prediction.label,
        probability=prediction.probability,
        task=prediction.task,
        match=MatchBody(prediction.score, prediction.margin, prediction.runner_up, unknown, every),
        top=tuple(TopBody(row.label, row.task, row.probability) for row in prediction.top),
        pool_version=pool_version,
        matcher=prediction.matcher,
        queries=prediction.num_queries,
    )


def answer_json(answer: AnswerBody) -> dict[str, Any]:
    """For `json.dumps`. `dataclasses.asdict` would copy every value, for every request."""
    match = dict(vars(answer.match))
    if answer.match.scores is None:
        del match["scores"]
    else:
        match["scores"] = [vars(row) for row in answer.match.scores]
    return vars(answer) | {"match": match, "top": [vars(row) for row in answer.top]}
