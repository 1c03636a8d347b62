"""From the bytes of some pictures to answers, all of them from one pool: decode, batch, predict, remember."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Float
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mqmk.deploy.agreement import Agreement
from mqmk.deploy.batching import Batcher
from mqmk.deploy.errors import (
    BusyError,
    NotReadyError,
    NotRememberedError,
    RequestError,
    TooLargeError,
    UnprocessableError,
    WrongMediaTypeError,
)
from mqmk.deploy.feedback import Answers, Owners, Remembered, Verdict
from mqmk.deploy.measures import Measures
from mqmk.deploy.metric_names import NO_MATCHER
from mqmk.deploy.pool_holder import Held, PoolHolder
from mqmk.deploy.replica_metrics import NoMetrics
from mqmk.deploy.settings import ServeSettings
from mqmk.matcher.errors import ImageError, MatchError
from mqmk.matcher.images import ImageLimits, decode, pixel_count, prepare
from mqmk.matcher.matchers import MATCHERS
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.predictor import AUTO, Prediction, PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import FrozenViT

T = TypeVar("T")

CHOICES: Final = (AUTO, *(name for name in MATCHERS if name not in ("perfect", "ridge")))
"""What a request may ask for; `perfect` would have to be told the answer, `ridge` needs what only benchmarks keep."""
NOTHING_LEARNED: Final = (
    "nothing has been learned yet: put a task into the bucket (mqmk-daemon pack makes one from a folder of pictures) "
    "and watch mqmk-daemon status"
)

Picture = Callable[[], Image.Image]
"""Gives the decoded picture; runs in a decoding thread and may raise ImageError."""
Elsewhere = Callable[[str, str], Awaitable[Verdict | None]]
"""Asks the other replicas about an answer of theirs."""


@dataclass(frozen=True)
class Question:
    """What a request may choose."""

    matcher: str | None = None
    """None takes the configured one."""
    top_k: int | None = None


@dataclass(frozen=True)
class Stages:
    """Where the time of one request went, in seconds."""

    decode: float
    queue: float
    match: float


@dataclass(frozen=True)
class Answered:
    """One picture's answer, and the pool it came from."""

    id: str
    prediction: Prediction
    scores: tuple[tuple[str, float], ...]
    """S_t of every task that was scored, the best first."""
    unknown: bool | None
    """Whether the picture looks like nothing the pool knows; None if the pool was not calibrated for it."""
    pool_version: int
    stages: Stages | None = None
    """Of the whole request; None outside the service."""


@dataclass(frozen=True)
class _Computed:
    prediction: Prediction
    scores: tuple[tuple[str, float], ...]
    began: float
    ended: float
    """Of its batch."""


class Service:
    """One replica's predictor. Belongs to one event loop."""

    def __init__(
        self,
        vit: FrozenViT,
        holder: PoolHolder,
        settings: ServeSettings,
        elsewhere: Elsewhere | None = None,
        measures: Measures | None = None,
    ) -> None:
        self.settings, self.holder = settings, holder
        self.answers = Answers(settings.remembered_answers)
        self.answered = 0
        self.measures = measures or Measures(NoMetrics(), settings)
        self._agreement = Agreement(vit, settings.agreement_share, self.measures.agreed)
        self._vit, self._elsewhere, self._inside = vit, elsewhere, 0
        self._limits = ImageLimits(settings.request_bytes, settings.pixels)
        self._decoders = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="decode")
        self._batcher: Batcher[tuple[Held, str], Float[Tensor, "3 height width"], _Computed] = Batcher(
            self._compute, settings.max_batch, settings.batch_wait_seconds
        )

    @property
    def ready(self) -> bool:
        """Whether there is a pool with a task in it."""
        held = self.holder.held
        return held is not None and bool(held.pool.tasks)

    @property
    def backbone(self) -> str:
        """Its name."""
        return self._vit.info.name

    def matcher_of(self, question: Question) -> str:
        """What a request would be matched by now; `none` before anything was learned."""
        held = self.holder.held
        return self._chosen(held, question) if held and held.pool.tasks else NO_MATCHER

    def export(self) -> None:
        """Tell metrics that are told from time to time; any thread may call, and it never raises."""
        self.measures.export(self.holder.held, self._inside, self.answers.told)

    async def aside(self, work: Callable[..., T], *given: Any) -> T:
        """Do what would hold up the event loop in a decoding thread."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, partial(work, *given))

    def from_bytes(self, data: bytes) -> Picture:
        """A picture in a file's bytes."""
        return partial(decode, data, self._limits)

    async def predict(self, request_id: str, pictures: Sequence[Picture], question: Question) -> list[Answered]:
        """Answer some pictures; every answer is from the pool that was held when the request came."""
        held = self.holder.held
        if held is None or not held.pool.tasks:
            raise NotReadyError(NOTHING_LEARNED)
        if len(pictures) > self.settings.max_pictures:
            raise TooLargeError(
                f"expected at most {self.settings.max_pictures} pictures a request, got {len(pictures)}"
            )
        if self._inside and self._inside + len(pictures) > self.settings.max_queue:
            raise BusyError(f"{self._inside} pictures are under way already; try again in a second")
        self._inside += len(pictures)
        try:
            async with asyncio.timeout(self.settings.timeout_seconds):
                return await self._answer(request_id, held, pictures, question)
        except TimeoutError as error:
            raise NotReadyError(f"no answer within {self.settings.timeout_seconds:g} s; try again later") from error
        except MatchError as error:
            raise UnprocessableError(str(error)) from error
        finally:
            self._inside -= len(pictures)

    async def feedback(self, request_id: str, label: str) -> Verdict:
        """Count what the true label says about an answer, whichever replica gave it."""
        verdict = self.answers.tell(request_id, label)
        if verdict is None and self._elsewhere:
            verdict = await self._elsewhere(request_id, label)
        if verdict is None:
            self.answers.missed()
            raise NotRememberedError(
                f"no answer with the id {request_id!r} is remembered; each replica keeps its last "
                f"{self.settings.remembered_answers:,}"
            )
        return verdict

    def close(self) -> None:
        """End the threads."""
        self._batcher.close()
        self._agreement.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)

    async def _answer(
        self, request_id: str, held: Held, pictures: Sequence[Picture], question: Question
    ) -> list[Answered]:
        began = time.perf_counter()
        images = await asyncio.gather(*(self.aside(self._tensor, picture) for picture in pictures))
        decoded = time.perf_counter()
        computed = await self._batcher.submit((held, self._chosen(held, question)), images)
        begun, ended = min(found.began for found in computed), max(found.ended for found in computed)
        stages = Stages(decoded - began, begun - decoded, ended - begun)
        self.measures.stages(stages.decode, stages.queue, stages.match)
        top_k = question.top_k or self.settings.top_k
        ids = [request_id] if len(pictures) == 1 else [f"{request_id}.{place}" for place in range(len(pictures))]
        told = [self._told(own_id, held, found, top_k) for own_id, found in zip(ids, computed, strict=True)]
        answers = [replace(answered, stages=stages) for answered in told]
        for image, answered in zip(images, answers, strict=True):
            self.measures.answer(held, answered.prediction, answered.unknown)
            self._agreement.sample(held, image, answered.prediction)
        return answers

    def _chosen(self, held: Held, question: Question) -> str:
        name = question.matcher or self.settings.matcher
        return held.auto if name == AUTO else name

    def _told(self, own_id: str, held: Held, found: _Computed, top_k: int) -> Answered:
        prediction = replace(found.prediction, top=found.prediction.top[:top_k])
        known = Remembered(
            held.version, prediction.task, prediction.margin, prediction.label, owners_of_labels(held.pool)
        )
        self.answers.remember(own_id, known)
        self.answered += 1
        threshold = held.confidence(prediction.matcher).threshold
        unknown = None if threshold is None else prediction.score < threshold
        return Answered(own_id, prediction, found.scores, unknown, held.version)

    def _tensor(self, picture: Picture) -> Float[Tensor, "3 height width"]:
        try:
            return prepare(picture(), self._vit.info)
        except ImageError as error:
            raise self._refusal(picture, error) from error

    def _refusal(self, picture: Picture, error: ImageError) -> RequestError:
        data = picture.args[0] if isinstance(picture, partial) else b""
        if pixel_count(data) > self._limits.pixels:
            return TooLargeError(f"expected at most {self._limits.pixels:,} pixels: {error}")
        if isinstance(error.__cause__, UnidentifiedImageError):
            return WrongMediaTypeError(str(error))
        return UnprocessableError(str(error))

    def _compute(self, key: tuple[Held, str], images: Sequence[Float[Tensor, "3 height width"]]) -> list[_Computed]:
        began, (held, matcher) = time.perf_counter(), key
        settings = PredictSettings(matcher, self.settings.budget)
        predicted = predict(self._vit, held.pool, torch.stack(list(images)).to(self._vit.device), settings)
        names = [task.name for task in held.pool.tasks]
        rows = [_ranked(names, row) for row in predicted.match.scores.tolist()]
        named = name_answers(held.pool, predicted, top_k=100)
        ended = time.perf_counter()
        self.measures.batch(len(images))
        return [_Computed(prediction, row, began, ended) for prediction, row in zip(named, rows, strict=True)]


def _ranked(names: Sequence[str], scores: Sequence[float]) -> tuple[tuple[str, float], ...]:
    scored = [(name, score) for name, score in zip(names, scores, strict=True) if score != -torch.inf]
    return tuple(sorted(scored, key=lambda pair: -pair[1]))


def owners_of_labels(pool: PromptPool) -> Owners:
    """The tasks that know each label."""

    def compute() -> Owners:
        owners: dict[str, set[str]] = {}
        for number, label in pool.labels:
            owners.setdefault(label, set()).add(pool.tasks[number].name)
        return {label: frozenset(tasks) for label, tasks in owners.items()}

    return pool.remember("owners of labels", compute)
