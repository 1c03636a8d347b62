"""Which pool a replica serves: the one that CURRENT names, once it has been loaded and proven beside the old one.

Requests take `held` once and keep it to their end; a swap replaces that one reference. Whatever is wrong with a new
pool, the old one stays: the reason is counted and kept, and nothing raises. The pool before stays in memory, so that a
roll-back costs one look at the pointer.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

import torch

from mqmk.deploy.making_way import make_way
from mqmk.matcher import golden
from mqmk.matcher.calibration import Confidence, confidence_of
from mqmk.matcher.errors import PoolError
from mqmk.matcher.golden import Golden
from mqmk.matcher.matchers import MATCHERS
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_store import Pointer, PoolSource
from mqmk.matcher.predictor import AUTO, PredictSettings, choose_matcher, name_answers, predict_from
from mqmk.matcher.prompted_vit import FrozenViT, Stem
from mqmk.matcher.queries import LiveQueries, PausedQueries

log = logging.getLogger(__name__)

_REST: Final = 5.0
"""How many times as long as a piece of work the rest after it is."""
_LONGEST_REST: Final = 0.05
_ALL_RESTS: Final = 0.6
"""Seconds; a version must be everywhere within two."""
Stage = Literal["pointer", "read", "fit", "replay", "warm-up"]
"""Where a new pool was refused: CURRENT itself; its files (hash, backbone, shapes, finite); the width and depth of the
backbone; the golden replay; the first answer."""


@dataclass(frozen=True, eq=False)
class Held:
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
        """What the pool says about the certainty of a matcher."""
        return _confidence(self.pool, matcher)


@dataclass(frozen=True)
class Refusal:
    """Why a pool is not served."""

    pointer: Pointer | None
    stage: Stage
    reason: str

    def __str__(self) -> str:
        which = f"version {self.pointer.version}: " if self.pointer else ""
        return f"{which}{self.stage}: {self.reason}"


class _RefusedError(Exception):
    def __init__(self, stage: Stage, reason: Exception) -> None:
        self.stage: Stage = stage
        self.reason = f"{type(reason).__name__}: {reason}"
        if isinstance(reason, PoolError):
            self.reason = str(reason)


class PoolHolder:
    """Watches a pool store for one backbone. One thread calls `look`; any thread reads the rest."""

    def __init__(
        self,
        store: PoolSource,
        vit: FrozenViT,
        settings: PredictSettings,
        *,
        retry_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._vit, self._settings = store, vit, settings
        self._retry_seconds, self._clock = retry_seconds, clock
        self._look_again = 0.0
        self._embedded: Stem | None = None
        self.held: Held | None = None
        self.previous: Held | None = None
        self.swaps = 0
        self.refusals: Counter[Stage] = Counter()
        self.last_refusal: Refusal | None = None
        """Of the pool that CURRENT names now; None when that one is served."""

    def look(self) -> bool:
        """Read the pointer and follow it if that is possible; true if another pool is held now. Never raises."""
        before, pointer = self.held, None
        try:
            with _stage("pointer"):
                pointer = self._store.current()
                if pointer is None and before is not None:
                    raise PoolError(f"{self._store.name}: CURRENT is gone; version {before.version} stays")
            if pointer is not None:
                self._follow(pointer)
            self.last_refusal = None
        except _RefusedError as refused:
            self._refuse(Refusal(pointer, refused.stage, refused.reason))
        return self.held is not before

    @property
    def caught_up(self) -> bool:
        """Whether the pool that CURRENT names is held; also before anything was learned."""
        with suppress(PoolError, OSError):
            pointer = self._store.current()
            return pointer is None or (self.held is not None and self.held.pointer == pointer)
        return False

    def _follow(self, pointer: Pointer) -> None:
        if self.held and self.held.pointer == pointer:
            return
        if self.previous and self.previous.pointer == pointer:
            self.held, self.previous = self.previous, self.held  # proven before
        elif not self._waiting(pointer):
            self.held, self.previous = self._load(pointer), self.held
        else:
            refusal = self.last_refusal
            assert refusal is not None
            raise _RefusedError(refusal.stage, PoolError(refusal.reason))
        self.swaps += 1
        log.info("serving version %s now (%s)", pointer.version, pointer.digest[:12], extra={"event": "swapped"})

    def _waiting(self, pointer: Pointer) -> bool:
        """Whether this very pool was refused a moment ago."""
        refusal = self.last_refusal
        return refusal is not None and refusal.pointer == pointer and self._clock() < self._look_again

    def _load(self, pointer: Pointer) -> Held:
        breathe: Callable[[], None] = _Breather() if self.held else lambda: None
        if self._embedded is None:
            self._embedded = golden.embedded(self._vit)
        with _stage("read"):
            pool = self._store.read(pointer, self._vit.info).to(self._vit.device)
        with _stage("fit"):
            _check_fit(pool, self._vit)
        with _stage("replay"):
            breathe()
            recorded = golden.record(self._vit, pool, breathe, self._embedded)
            if self.held:
                golden.compare(self.held.pool, self.held.golden, pool, recorded)
        with _stage("warm-up"):
            return Held(pointer, pool, recorded, self._warm_up(pool, breathe))

    @torch.inference_mode()
    def _warm_up(self, pool: PromptPool, breathe: Callable[[], None]) -> str:
        """Answer once, as a request will: derived tensors are computed now, and every part has worked together."""
        if not pool.tasks:
            return self._settings.matcher
        assert self._embedded is not None
        auto = choose_matcher(pool, self._settings.budget, self._settings.match.shortlist)
        matcher = auto if self._settings.matcher == AUTO else self._settings.matcher
        first = LiveQueries(self._vit, pool, self._embedded.rows(torch.tensor([0])), rows_per_pass=1)
        predicted = predict_from(PausedQueries(first, breathe), pool, matcher, self._settings)
        if not torch.isfinite(predicted.probabilities).all():
            raise PoolError("the first answer's probabilities are not finite")
        name_answers(pool, predicted)
        _check_confidence(pool)
        return auto

    def _refuse(self, refusal: Refusal) -> None:
        if refusal != self.last_refusal:
            self.refusals[refusal.stage] += 1
            self.last_refusal = refusal
            log.warning("a pool is not served: %s", refusal, extra={"event": "refused"})
        if self._clock() >= self._look_again:
            self._look_again = self._clock() + self._retry_seconds


class _Breather:
    """Rests after each piece of work: requests share the cores with a small part of a load, and wait for a piece."""

    def __init__(self) -> None:
        self._began, self._left = time.monotonic(), _ALL_RESTS

    def __call__(self) -> None:
        rest = min(_LONGEST_REST, _REST * (time.monotonic() - self._began), self._left)
        time.sleep(rest)
        self._began, self._left = time.monotonic(), self._left - rest


class Watcher:
    """The thread that looks at the pointer, and tells when it has looked."""

    def __init__(self, holder: PoolHolder, seconds: float, looked: Callable[[], None]) -> None:
        self._holder, self._seconds, self._looked = holder, seconds, looked
        self._wake, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="pool-watcher", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still watches."""
        return self._thread.is_alive()

    def hint(self) -> None:
        """Look now; the pointer stays the truth."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        make_way(by=5)
        while not self._end.is_set():
            self._holder.look()
            self._looked()
            self._wake.wait(self._seconds)
            self._wake.clear()


def _check_fit(pool: PromptPool, vit: FrozenViT) -> None:
    if pool.g_prompt.shape[-1] != vit.dim or any(task.keys.shape[-1] != vit.dim for task in pool.tasks):
        raise PoolError(f"expected prompts and keys of width {vit.dim}, got {pool.g_prompt.shape[-1]}")
    if max((*pool.e_layers, *pool.g_layers)) >= vit.depth:
        raise PoolError(f"expected prompts for {vit.depth} layers, got {pool.g_layers} and {pool.e_layers}")


def _confidence(pool: PromptPool, matcher: str) -> Confidence:
    return pool.remember(("confidence", matcher), lambda: confidence_of(pool.matching, matcher))


def _check_confidence(pool: PromptPool) -> None:
    """Whatever may be wrong with it shows now, and not in an answer."""
    for matcher in MATCHERS:
        calibration = _confidence(pool, matcher).calibration
        if calibration and not 0 <= calibration.probability(0.5, 0.1) <= 1:
            raise PoolError(f"the calibration of {matcher} gives no probability")


@contextmanager
def _stage(stage: Stage) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a damaged file can cause must not end the watcher
        raise _RefusedError(stage, error) from error
