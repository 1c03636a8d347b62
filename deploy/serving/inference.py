"""From the bytes of some images to answers, all of them from one pool: decode, batch, predict, remember."""

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

from mqmk.deploy.serving.answer import AnswerBody, make_answer
from mqmk.deploy.serving.batching import Batcher
from mqmk.deploy.serving.errors import (
    BusyError,
    NothingLearnedError,
    NotReadyError,
    RequestError,
    TooLargeError,
    UnknownRequestIdError,
    UnprocessableError,
    WrongMediaTypeError,
)
from mqmk.deploy.serving.feedback import FeedbackBody, RecentAnswer, RecentAnswers
from mqmk.deploy.serving.pools.live_pool import LivePool, LoadedPool
from mqmk.deploy.serving.settings import ServiceSpec
from mqmk.deploy.serving.telemetry.agreement import Agreement
from mqmk.deploy.serving.telemetry.declared import NO_MATCHER
from mqmk.deploy.serving.telemetry.ray_backend import NoMetrics
from mqmk.deploy.serving.telemetry.recorder import RequestMetrics
from mqmk.matcher.errors import ImageError, MatchError
from mqmk.matcher.images import ImageLimits, decode, pixel_count, prepare
from mqmk.matcher.matcher_info import AUTO, SERVABLE_MATCHERS
from mqmk.matcher.pool import PromptPool, cache_on_pool
from mqmk.matcher.predictor import Prediction, PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import FrozenViT

T = TypeVar("T")

CHOICES: Final = (AUTO, *SERVABLE_MATCHERS)
"""The matchers that a request may choose."""
MAX_TOP: Final = 100
"""The most classes that a request may ask for; a batch is named before it is known who asks for how many."""
MAX_BROADCASTS: Final = 4
"""Calls to all replicas that one replica makes at a time."""
NOTHING_LEARNED: Final = (
    "nothing has been learned yet: put a task into the bucket (mqmk-daemon pack makes one from a folder of images) "
    "and watch mqmk-daemon status"
)

ImageLoader = Callable[[], Image.Image]
"""Returns the decoded image; runs in a decoding thread and may raise ImageError."""
OtherReplicas = Callable[[str, str], Awaitable[FeedbackBody | None]]
"""Records the true label of an answer at the replica that gave it, which may be this one."""


@dataclass(frozen=True)
class PredictOptions:
    """What a request may choose."""

    matcher: str | None = None
    """None takes the configured one."""
    top_k: int | None = None
    with_scores: bool = False
    """Add the match score of every task to the answers."""


@dataclass(frozen=True)
class StageTimes:
    """Where the time of one request went, in seconds."""

    decode: float
    queue: float
    match: float


@dataclass(frozen=True)
class PredictResult:
    """The answers to one request, in the order of its images."""

    answers: tuple[AnswerBody, ...]
    stages: StageTimes


@dataclass(frozen=True)
class _Computed:
    prediction: Prediction
    task: int
    """The number of the matched task."""
    scores: Float[Tensor, " tasks"]
    """S_t of every task; -inf where it was not scored."""
    began: float
    ended: float
    """Of its batch."""


class Service:
    """One replica's predictor. Belongs to one event loop."""

    def __init__(
        self,
        vit: FrozenViT,
        live_pool: LivePool,
        spec: ServiceSpec,
        other_replicas: OtherReplicas | None = None,
        metrics: RequestMetrics | None = None,
    ) -> None:
        self.spec, self.live_pool = spec, live_pool
        self.answers = RecentAnswers(spec.remembered_answers)
        self.num_answers = 0
        self.metrics = metrics or RequestMetrics(NoMetrics(), spec)
        self._agreement = Agreement(vit, spec.serve.agreement_share, self.metrics.count_agreement)
        self._vit, self._other_replicas, self._inflight = vit, other_replicas, 0
        self._pending_labels, self._broadcasts = 0, asyncio.Semaphore(MAX_BROADCASTS)
        self._limits = ImageLimits(spec.serve.request_bytes, spec.pixels, spec.formats)
        self._decoders = ThreadPoolExecutor(spec.decode_threads, thread_name_prefix="decode")
        self._batcher: Batcher[tuple[LoadedPool, str], Float[Tensor, "3 height width"], _Computed] = Batcher(
            self._compute, spec.serve.max_batch, spec.serve.batch_wait_seconds
        )

    def require_pool(self) -> LoadedPool:
        """The pool to answer with; NothingLearnedError while it has no task."""
        loaded = self.live_pool.loaded
        if loaded is None or not loaded.pool.tasks:
            raise NothingLearnedError(NOTHING_LEARNED)
        return loaded

    @property
    def backbone(self) -> str:
        """Its name."""
        return self._vit.info.name

    def matcher_of(self, options: PredictOptions) -> str:
        """The matcher that a request would get now; `none` before anything was learned."""
        loaded = self.live_pool.loaded
        return self._choose_matcher(loaded, options) if loaded and loaded.pool.tasks else NO_MATCHER

    def export(self) -> None:
        """Update the metrics that are exported periodically; any thread may call, and it never raises."""
        self.metrics.export(self.live_pool.loaded, self._inflight, self.answers.totals)

    async def run_in_thread(self, work: Callable[..., T], *given: Any) -> T:
        """Run what would block the event loop in a decoding thread."""
        return await asyncio.get_running_loop().run_in_executor(self._decoders, partial(work, *given))

    def from_bytes(self, data: bytes) -> ImageLoader:
        """A loader of an encoded image."""
        return partial(decode, data, self._limits)

    async def predict(self, request_id: str, loaders: Sequence[ImageLoader], options: PredictOptions) -> PredictResult:
        """Answer some images; every answer is from the pool that was loaded when the request came."""
        loaded, serve = self.require_pool(), self.spec.serve
        if len(loaders) > self.spec.max_images:
            raise TooLargeError(f"expected at most {self.spec.max_images} images per request, got {len(loaders)}")
        if self._inflight and self._inflight + len(loaders) > serve.max_queue:
            raise BusyError(f"{self._inflight} images are already in flight; retry in a second")
        self._inflight += len(loaders)
        try:
            async with asyncio.timeout(serve.timeout_seconds):
                return await self._answer(request_id, loaded, loaders, options)
        except TimeoutError as error:
            raise NotReadyError(f"no answer within {serve.timeout_seconds:g} s; retry later") from error
        except MatchError as error:
            raise UnprocessableError(str(error)) from error
        finally:
            self._inflight -= len(loaders)

    async def feedback(self, request_id: str, label: str) -> FeedbackBody:
        """Count what the true label says about an answer, whichever replica gave it."""
        if self._other_replicas:
            feedback = await self._broadcast_feedback(self._other_replicas, request_id, label)
        else:
            feedback = self.answers.record_label(request_id, label)
        if feedback is None:
            self.answers.count_unknown_id()
            raise UnknownRequestIdError(
                f"no answer with the id {request_id!r} is remembered; each replica keeps its last "
                f"{self.spec.remembered_answers:,}"
            )
        return feedback

    def close(self) -> None:
        """Stop the threads."""
        self._batcher.close()
        self._agreement.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)

    async def _broadcast_feedback(self, replicas: OtherReplicas, request_id: str, label: str) -> FeedbackBody | None:
        """A few at a time: each is a call to every replica, and Serve does not limit such calls."""
        if self._pending_labels >= self.spec.serve.max_queue:
            raise BusyError(f"{self._pending_labels} labels are already waiting; retry in a second")
        self._pending_labels += 1
        try:
            async with asyncio.timeout(self.spec.serve.timeout_seconds), self._broadcasts:
                return await replicas(request_id, label)
        except TimeoutError as error:
            raise NotReadyError("another replica did not answer; retry later") from error
        finally:
            self._pending_labels -= 1

    async def _answer(
        self, request_id: str, loaded: LoadedPool, loaders: Sequence[ImageLoader], options: PredictOptions
    ) -> PredictResult:
        began = time.perf_counter()
        images = await asyncio.gather(*(self.run_in_thread(self._prepare, load) for load in loaders))
        decoded = time.perf_counter()
        computed = await self._batcher.submit((loaded, self._choose_matcher(loaded, options)), images)
        first, last = min(found.began for found in computed), max(found.ended for found in computed)
        stages = StageTimes(decoded - began, first - decoded, last - first)
        self.metrics.observe_stages(stages.decode, stages.queue, stages.match)
        ids = [request_id] if len(loaders) == 1 else [f"{request_id}.{place}" for place in range(len(loaders))]
        answers = [self._finish(own_id, loaded, found, options) for own_id, found in zip(ids, computed, strict=True)]
        for image, found, answer in zip(images, computed, answers, strict=True):
            self.metrics.count_answer(loaded, found.prediction, answer.match.unknown)
            self._agreement.sample(loaded, image, found.prediction)
        return PredictResult(tuple(answers), stages)

    def _choose_matcher(self, loaded: LoadedPool, options: PredictOptions) -> str:
        name = options.matcher or self.spec.serve.matcher
        return loaded.auto if name == AUTO else name

    def _finish(self, own_id: str, loaded: LoadedPool, found: _Computed, options: PredictOptions) -> AnswerBody:
        """The answer about one image, remembered for feedback."""
        top_k = options.top_k or self.spec.top_k
        prediction = replace(found.prediction, top=found.prediction.top[:top_k])
        classes = _classes_of_tasks(loaded.pool)
        recent = RecentAnswer(loaded.version, prediction.task, prediction.label, classes[found.task], classes)
        self.answers.remember(own_id, recent)
        self.num_answers += 1
        confidence = loaded.confidence(prediction.matcher)
        unknown = confidence.is_unknown(prediction.probability, prediction.score)
        scores = _rank(loaded.pool, found.scores) if options.with_scores else None
        return make_answer(own_id, prediction, loaded.version, unknown, scores)

    def _prepare(self, load: ImageLoader) -> Float[Tensor, "3 height width"]:
        try:
            return prepare(load(), self._vit.info)
        except ImageError as error:
            raise self._request_error(load, error) from error

    def _request_error(self, load: ImageLoader, error: ImageError) -> RequestError:
        data = load.args[0] if isinstance(load, partial) else b""
        if pixel_count(data, self._limits.formats) > self._limits.pixels:
            message = str(error)  # our own limit, or what Pillow says about a decompression bomb
            prefix = "" if message.startswith("expected") else f"expected at most {self._limits.pixels:,} pixels: "
            return TooLargeError(f"{prefix}{message}")
        if isinstance(error.__cause__, UnidentifiedImageError):
            return WrongMediaTypeError(str(error))
        return UnprocessableError(str(error))

    def _compute(
        self, key: tuple[LoadedPool, str], images: Sequence[Float[Tensor, "3 height width"]]
    ) -> list[_Computed]:
        began, (loaded, matcher) = time.perf_counter(), key
        settings = PredictSettings(matcher, self.spec.serve.budget)
        predicted = predict(self._vit, loaded.pool, torch.stack(list(images)).to(self._vit.device), settings)
        rows = zip(
            name_answers(loaded.pool, predicted, MAX_TOP), predicted.match.task.tolist(), predicted.match.scores.cpu(),
            strict=True,
        )  # fmt: skip
        ended = time.perf_counter()
        self.metrics.observe_batch(len(images))
        return [_Computed(*row, began, ended) for row in rows]


def _rank(pool: PromptPool, scores: Float[Tensor, " tasks"]) -> tuple[tuple[str, float], ...]:
    """The tasks that were scored, the best first."""
    ranked = scores.sort(descending=True, stable=True)
    pairs = zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True)
    return tuple((pool.tasks[number].name, score) for number, score in pairs if score != -torch.inf)


@cache_on_pool
def _classes_of_tasks(pool: PromptPool) -> tuple[tuple[str, ...], ...]:
    return tuple(task.classes for task in pool.tasks)
