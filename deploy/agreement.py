"""Does the serving matcher find the task that exact matching finds? Asked of a sample of answers, beside the requests.

One comparison at a time, in a thread of its own that yields to requests, and with rests: exact matching costs a query
for every task, and a sample that would cost more than a little of one core is made smaller.
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

from mqmk.deploy.making_way import make_way
from mqmk.deploy.pool_holder import Held
from mqmk.matcher.matchers import match
from mqmk.matcher.predictor import Prediction
from mqmk.matcher.prompted_vit import FrozenViT

log = logging.getLogger(__name__)

EXACT: Final = "mqmk"
MOST_TIME: Final = 0.005
"""The share of time that comparisons may take: fewer requests than one in a hundred meet one, whatever it costs."""


class Agreement:
    """Compares a sample of answers; `agreed(matcher, same)` is told of each. `sample` belongs to one event loop."""

    def __init__(
        self,
        vit: FrozenViT,
        share: float,
        agreed: Callable[[str, bool], None],
        *,
        most_time: float = MOST_TIME,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._vit, self._share, self._agreed, self._chance = vit, share, agreed, chance
        self._rest = (1 - most_time) / most_time
        self._free_at = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agreement", initializer=make_way, initargs=(10,))

    def sample(self, held: Held, image: Float[Tensor, "3 height width"], prediction: Prediction) -> None:
        """Perhaps compare an answer, with the pool that gave it; returns at once."""
        if self._chance() >= self._share:
            return
        if prediction.matcher == EXACT:
            self._agreed(EXACT, True)
        elif time.monotonic() >= self._free_at:
            self._free_at = float("inf")
            self._thread.submit(self._compare, held, image, prediction)

    def close(self, wait: bool = False) -> None:
        """End the thread."""
        self._thread.shutdown(wait=wait, cancel_futures=not wait)

    @torch.inference_mode()
    def _compare(self, held: Held, image: Float[Tensor, "3 height width"], prediction: Prediction) -> None:
        began = time.monotonic()
        try:
            found = match(EXACT, self._vit, held.pool, image[None].to(self._vit.device))
            self._agreed(prediction.matcher, held.pool.tasks[int(found.task[0])].name == prediction.task)
        except Exception:  # the answer was given; only this comparison is missing
            log.exception("an answer could not be compared", extra={"event": "agreement_failed"})
        finally:
            now = time.monotonic()
            self._free_at = now + self._rest * (now - began)
