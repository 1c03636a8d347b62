"""Does the serving matcher find the task that exact matching finds? Checked on a sample of answers, in the background.

One comparison at a time, in a low-priority thread, and with pauses: exact matching costs a query for every task, so the
sample shrinks where it would cost more than a little of one core.
"""

import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.deploy.serving.pools.live_pool import LoadedPool
from mqmk.deploy.serving.ray_compat.thread_priority import lower_thread_priority
from mqmk.matcher.matcher_info import EXACT
from mqmk.matcher.matchers import match_images
from mqmk.matcher.predictor import Prediction
from mqmk.matcher.prompted_vit import FrozenViT

log = logging.getLogger(__name__)

MAX_SHARE_OF_TIME: Final = 0.005
"""The share of time that comparisons may take: fewer than one request in a hundred overlaps with one."""


class Agreement:
    """Compares a sample of answers and calls `count(matcher, same)` for each. `sample` belongs to one event loop."""

    def __init__(
        self,
        vit: FrozenViT,
        share: float,
        count: Callable[[str, bool], None],
        *,
        max_share_of_time: float = MAX_SHARE_OF_TIME,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._vit, self._share, self._count, self._chance = vit, share, count, chance
        self._rest = (1 - max_share_of_time) / max_share_of_time
        self._free_at = 0.0
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="agreement", initializer=lower_thread_priority, initargs=(10,)
        )

    def sample(self, loaded: LoadedPool, image: Float[Tensor, "3 height width"], prediction: Prediction) -> None:
        """Maybe compare an answer, using the pool that gave it; returns at once."""
        if self._chance() >= self._share:
            return
        if prediction.matcher == EXACT:
            self._count(EXACT, True)
        elif time.monotonic() >= self._free_at:
            self._free_at = float("inf")
            self._thread.submit(self._compare, loaded, image, prediction)

    def close(self, wait: bool = False) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=wait, cancel_futures=not wait)

    @torch.inference_mode()
    def _compare(self, loaded: LoadedPool, image: Float[Tensor, "3 height width"], prediction: Prediction) -> None:
        began = time.monotonic()
        try:
            found = match_images(EXACT, self._vit, loaded.pool, image[None].to(self._vit.device))
            self._count(prediction.matcher, loaded.pool.tasks[int(found.task[0])].name == prediction.task)
        except Exception:  # the answer is out already; only this comparison is lost
            log.exception("an answer could not be compared", extra={"event": "agreement.comparison_failed"})
        finally:
            now = time.monotonic()
            self._free_at = now + self._rest * (now - began)
