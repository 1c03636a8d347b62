"""SQSK, SQMK, MQSK, MQMK, MQMK-EI, cascade, anchor and fused: our own pool, trained once, under one matcher each.

Each has the read-out that is better for it: matchers with keys of their own prompts answer among the classes of the
matched task; SQSK, SQMK and MQSK, which often match a wrong one, among all classes.
"""

from collections.abc import Callable
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.learner.bench.methods.parts.protocol import Answer, MethodInfo, MethodSettings, Published
from mqmk.learner.bench.methods.parts.trained_pool import TrainedPool
from mqmk.learner.data.tasks import Task
from mqmk.matcher.classifiers import READOUTS, logits
from mqmk.matcher.matcher_info import MATCHER_INFO
from mqmk.matcher.matchers import MatchInput, MatchSettings, match_queries
from mqmk.matcher.prompted_vit import FrozenViT


class MQMK:
    """A pool and the names of a matcher and a read-out."""

    def __init__(self, vit: FrozenViT, settings: MethodSettings, matcher: str = "mqmk", readout: str = "task") -> None:
        self._matcher, self._readout = matcher, readout
        info = MATCHER_INFO[matcher]
        self._trained = TrainedPool(vit, settings, info.uses_plain_query, statistics=info.needs == "statistics")

    @property
    def trained(self) -> int:
        """How many numbers the last task trained."""
        return self._trained.trained

    def learn(self, task: Task) -> None:
        """Train the task's prompt and head; keys follow in closed form."""
        self._trained.learn(task)

    @torch.no_grad()
    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """With the query of the matched task."""
        pool = self._trained.pool
        found = match_queries(self._matcher, MatchInput(self._trained.queries(images), pool, MatchSettings()))
        scores = {readout: logits(pool, found, "fc", readout) for readout in READOUTS}
        return Answer(scores[self._readout], found.task, scores["all"])

    def kept(self) -> dict[str, Tensor]:
        """The pool."""
        return self._trained.kept()


def with_matcher(matcher: str, readout: str = "task") -> Callable[[FrozenViT, MethodSettings], MQMK]:
    """A factory."""
    return lambda vit, settings: MQMK(vit, settings, matcher, readout)


_TRAINING: Final = "keys in closed form; the g-prompt is frozen after task 1; a new e-prompt starts as the first task's"
_OURS: Final = (_TRAINING, "answers among the classes of the matched task, where the paper takes all classes")

METHODS: Final = (
    MethodInfo(
        "sqsk",
        "pool",
        "our pool matched by the plain query and one key a task: DualPrompt as the paper tuned it",
        with_matcher("sqsk", "all"),
        Published(
            "MQMK paper", imagenet_r=70.61, matching_cifar100=49.14, matching_imagenet_r=45.15, matching_domainnet=70.55
        ),
        (_TRAINING,),
        epoch_passes=(1.9, 1.9),
        test_passes=0.4,
        shares_pool=True,
    ),
    MethodInfo(
        "sqmk",
        "pool",
        "our pool matched by the plain query and a key for every class",
        with_matcher("sqmk", "all"),
        Published("MQMK paper, from its ablation", imagenet_r=73.45, matching_imagenet_r=56.47),
        (_TRAINING,),
        epoch_passes=(1.9, 1.9),
        test_passes=0.3,
        shares_pool=True,
    ),
    MethodInfo(
        "mqsk",
        "pool",
        "a query for every task, one key a task",
        with_matcher("mqsk", "all"),
        Published("MQMK paper, from its ablation", imagenet_r=62.48, matching_imagenet_r=36.23),
        (_TRAINING,),
        epoch_passes=(1.9, 1.9),
        test_passes=1.5,
        shares_pool=True,
        rounds=1,
    ),
    MethodInfo(
        "mqmk",
        "pool",
        "a query for every task, a key for every class",
        with_matcher("mqmk"),
        Published(
            "MQMK paper",
            cifar100=91.73,
            imagenet_r=78.36,
            domainnet=85.62,
            matching_cifar100=82.28,
            matching_imagenet_r=77.97,
            matching_domainnet=82.24,
            imagenet_r_5=79.61,
            imagenet_r_20=76.10,
        ),
        _OURS,
        epoch_passes=(1.9, 1.9),
        test_passes=0.1,
        shares_pool=True,
        rounds=1,
    ),
    MethodInfo(
        "mqmk-ei",
        "pool",
        "one query with the mean of all e-prompts, a key for every class",
        with_matcher("mqmk-ei"),
        Published(
            "MQMK paper",
            cifar100=92.00,
            imagenet_r=78.00,
            domainnet=84.54,
            matching_cifar100=86.17,
            matching_imagenet_r=75.40,
            matching_domainnet=76.67,
            imagenet_r_5=78.50,
            imagenet_r_20=75.82,
        ),
        _OURS,
        epoch_passes=(1.9, 1.9),
        test_passes=0.9,
        shares_pool=True,
    ),
    MethodInfo(
        "cascade",
        "pool",
        "the query of mqmk-ei proposes three tasks, their own queries decide: a cost that does not grow with tasks",
        with_matcher("cascade"),
        deviations=_OURS,
        epoch_passes=(1.9, 1.9),
        test_passes=0.1,
        shares_pool=True,
    ),
    MethodInfo(
        "anchor",
        "pool",
        "one query with a prompt trained on task 1, a ridge regression over all classes",
        with_matcher("anchor"),
        None,
        (_TRAINING,),
        epoch_passes=(1.9, 1.9),
        test_passes=1.0,
        shares_pool=True,
    ),
    MethodInfo(
        "fused",
        "pool",
        "the regression of anchor, weighed with keys and heads of a shortlist",
        with_matcher("fused"),
        None,
        (_TRAINING, "fixed weights: a service fits them on held-out images, which this protocol has none of"),
        epoch_passes=(1.9, 1.9),
        test_passes=1.0,
        shares_pool=True,
        rounds=2,
    ),
)
