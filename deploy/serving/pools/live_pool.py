"""Which pool a replica serves: the one that CURRENT names, once it has been loaded and verified beside the old one.

Requests read `loaded` once and keep it to their end; a swap replaces that one reference. Whatever is wrong with a new
pool, the old one stays: the reason is counted and kept, and nothing raises. The previous pool stays in memory, so that
a rollback takes one poll of the pointer. Where there is no old pool, an earlier version may be served (fallback.py).
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

import torch

from mqmk.deploy.serving.pools.fallback import ancestors
from mqmk.deploy.serving.pools.paused_queries import PausedQueries
from mqmk.matcher import golden
from mqmk.matcher.calibration import Confidence, read_confidence
from mqmk.matcher.errors import PoolError
from mqmk.matcher.golden import Golden
from mqmk.matcher.matcher_info import AUTO, MATCHER_INFO
from mqmk.matcher.pool import PromptPool, cache_on_pool
from mqmk.matcher.pool_store import Pointer, PoolSource
from mqmk.matcher.predictor import PredictSettings, choose_matcher, name_answers, predict_from
from mqmk.matcher.prompted_vit import FrozenViT, Stem
from mqmk.matcher.queries import LiveQueries

log = logging.getLogger(__name__)

_PAUSE_FACTOR: Final = 5.0
"""A pause takes this many times as long as the piece of work before it."""
_LONGEST_PAUSE: Final = 0.05
_ALL_PAUSES: Final = 0.6
"""Seconds; a version must be live on every replica within two."""
Stage = Literal["pointer", "read", "fit", "replay", "warm-up"]
"""Where a new pool was rejected: CURRENT itself; its files (hash, backbone, shapes, finite); width and depth of the
backbone; the golden replay; the first answer."""


@dataclass(frozen=True, eq=False)
class LoadedPool:
    """A pool that can answer now."""

    pointer: Pointer
    pool: PromptPool
    golden: Golden
    auto: str
    """What the matcher `auto` means for this pool."""

    @property
    def version(self) -> int:
        """Of the pool."""
        return self.pointer.version

    def confidence(self, matcher: str) -> Confidence:
        """Calibration, threshold and reference of a matcher."""
        return _confidence(self.pool, matcher)


@dataclass(frozen=True)
class Rejection:
    """Why a pool is not served."""

    pointer: Pointer | None
    stage: Stage
    reason: str
    instead: int | None = None
    """The version that is served instead, as `serve.fallback` allows."""

    def __str__(self) -> str:
        which = f"version {self.pointer.version}: " if self.pointer else ""
        instead = f"; version {self.instead} is served instead" if self.instead is not None else ""
        return f"{which}{self.stage}: {self.reason}{instead}"


class _RejectedError(Exception):
    def __init__(self, stage: Stage, reason: Exception) -> None:
        self.stage: Stage = stage
        self.reason = f"{type(reason).__name__}: {reason}"
        if isinstance(reason, PoolError):
            self.reason = str(reason)


class LivePool:
    """Follows a pool store for one backbone. One thread calls `poll`; any thread reads the rest."""

    def __init__(
        self,
        store: PoolSource,
        vit: FrozenViT,
        settings: PredictSettings,
        *,
        retry_seconds: float = 5.0,
        fallback: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._vit, self._settings, self._may_fall_back = store, vit, settings, fallback
        self._retry_seconds, self._clock = retry_seconds, clock
        self._retry_at = 0.0
        self._golden_stem: Stem | None = None
        self.loaded: LoadedPool | None = None
        self.previous: LoadedPool | None = None
        self._substitute: LoadedPool | None = None
        """Served instead of CURRENT, which was damaged when nothing was loaded."""
        self.swaps = 0
        self.rejections: Counter[Stage] = Counter()
        self.last_rejection: Rejection | None = None
        """Of the pool that CURRENT names; None when that one is served."""

    def poll(self) -> bool:
        """Read the pointer and load what it names; true if another pool is served now. Never raises."""
        before, pointer = self.loaded, None
        try:
            with _stage("pointer"):
                pointer = self._store.current()
                if pointer is None and before is not None:
                    raise PoolError(f"{self._store.name}: CURRENT is missing; still serving version {before.version}")
            if pointer is not None:
                self._follow(pointer)
            self.last_rejection = self._substitute = None
        except _RejectedError as rejected:
            if pointer is not None and self.loaded is None:
                self._fall_back(pointer)
            instead = self._substitute.version if self._substitute else None
            self._record_rejection(Rejection(pointer, rejected.stage, rejected.reason, instead))
        return self.loaded is not before

    @property
    def can_serve(self) -> bool:
        """Whether requests can be answered: CURRENT is loaded, or a fallback."""
        return self._substitute is not None or self.is_current

    @property
    def is_current(self) -> bool:
        """Whether the pool that CURRENT names is loaded; also before anything was learned."""
        with suppress(PoolError, OSError):
            pointer = self._store.current()
            return pointer is None or (self.loaded is not None and self.loaded.pointer == pointer)
        return False

    def _follow(self, pointer: Pointer) -> None:
        if self.loaded and self.loaded.pointer == pointer:
            return
        if self.previous and self.previous.pointer == pointer:
            self.loaded, self.previous = self.previous, self.loaded  # verified before
        elif not self._was_just_rejected(pointer):
            self.loaded, self.previous = self._load(pointer), self.loaded
        else:
            rejection = self.last_rejection
            assert rejection is not None
            raise _RejectedError(rejection.stage, PoolError(rejection.reason))
        self.swaps += 1
        log.info(
            "now serving version %s (%s)", pointer.version, pointer.digest[:12], extra={"event": "replica.pool_swapped"}
        )

    def _fall_back(self, damaged: Pointer) -> None:
        """Load the newest sound ancestor, if that is allowed and there is one."""
        if not self._may_fall_back or self._clock() < self._retry_at:
            return
        with suppress(PoolError):  # the store does not answer: retried later
            for pointer in ancestors(self._store, damaged):
                with suppress(_RejectedError):
                    self.loaded = self._substitute = self._load(pointer)
                    log.warning("serving version %s instead of %s", pointer.version, damaged.version,
                                extra={"event": "replica.fell_back"})  # fmt: skip
                    return

    def _was_just_rejected(self, pointer: Pointer) -> bool:
        """Whether this pool was rejected less than `retry_seconds` ago."""
        rejection = self.last_rejection
        return rejection is not None and rejection.pointer == pointer and self._clock() < self._retry_at

    def _load(self, pointer: Pointer) -> LoadedPool:
        throttle: Callable[[], None] = _Throttle() if self.loaded else lambda: None
        if self._golden_stem is None:
            self._golden_stem = golden.embed_inputs(self._vit)
        with _stage("read"):
            known = [loaded.pool for loaded in (self.loaded, self.previous) if loaded]
            pool = self._store.read(pointer, self._vit.info, known).to(self._vit.device)
        with _stage("fit"):
            _check_fit(pool, self._vit)
        with _stage("replay"):
            throttle()
            recorded = golden.record(self._vit, pool, throttle, self._golden_stem)
            if self.loaded:
                golden.compare(self.loaded.pool, self.loaded.golden, pool, recorded)
        with _stage("warm-up"):
            return LoadedPool(pointer, pool, recorded, self._warm_up(pool, throttle))

    @torch.inference_mode()
    def _warm_up(self, pool: PromptPool, throttle: Callable[[], None]) -> str:
        """Answer once, as a request would: derived tensors are computed now, and all parts have worked together."""
        if not pool.tasks:
            return self._settings.matcher
        assert self._golden_stem is not None
        auto = choose_matcher(pool, self._settings.budget, self._settings.match.shortlist)
        matcher = auto if self._settings.matcher == AUTO else self._settings.matcher
        first = LiveQueries(self._vit, pool, self._golden_stem.rows(torch.tensor([0])), rows_per_pass=1)
        predicted = predict_from(PausedQueries(first, throttle), pool, matcher, self._settings)
        if not torch.isfinite(predicted.probabilities).all():
            raise PoolError("the first answer's probabilities are not finite")
        name_answers(pool, predicted)
        _check_confidence(pool)
        return auto

    def _record_rejection(self, rejection: Rejection) -> None:
        if rejection != self.last_rejection:
            self.rejections[rejection.stage] += 1
            self.last_rejection = rejection
            log.warning("pool rejected: %s", rejection, extra={"event": "replica.pool_rejected"})
        if self._clock() >= self._retry_at:
            self._retry_at = self._clock() + self._retry_seconds


class _Throttle:
    """Pauses after each piece of work: loading takes a small share of the cores, and requests wait for one piece."""

    def __init__(self) -> None:
        self._began, self._left = time.monotonic(), _ALL_PAUSES

    def __call__(self) -> None:
        pause = min(_LONGEST_PAUSE, _PAUSE_FACTOR * (time.monotonic() - self._began), self._left)
        time.sleep(pause)
        self._began, self._left = time.monotonic(), self._left - pause


def _check_fit(pool: PromptPool, vit: FrozenViT) -> None:
    if pool.g_prompt.shape[-1] != vit.dim or any(task.keys.shape[-1] != vit.dim for task in pool.tasks):
        raise PoolError(f"expected prompts and keys of width {vit.dim}, got {pool.g_prompt.shape[-1]}")
    if max((*pool.e_layers, *pool.g_layers)) >= vit.depth:
        raise PoolError(f"expected prompts for {vit.depth} layers, got {pool.g_layers} and {pool.e_layers}")


@cache_on_pool
def _confidence(pool: PromptPool, matcher: str) -> Confidence:
    return read_confidence(pool.matching, matcher)


def _check_confidence(pool: PromptPool) -> None:
    """A broken calibration shows now, and not in an answer."""
    for matcher in MATCHER_INFO:
        calibration = _confidence(pool, matcher).calibration
        if calibration and not 0 <= calibration.probability(0.5, 0.1) <= 1:
            raise PoolError(f"the calibration of {matcher} does not return a probability")


@contextmanager
def _stage(stage: Stage) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # nothing that a damaged file causes may end the watcher
        raise _RejectedError(stage, error) from error
