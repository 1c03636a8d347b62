"""What a benchmark method is: it learns one task after another and scores images over all classes seen so far.

Methods are compared under one protocol (`mqmk.learner.bench.compare`), so none of them computes its own accuracy, cost
or time. A method file lists what it offers in `METHODS`, a tuple of `MethodInfo`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from mqmk.learner.data.tasks import Task
from mqmk.learner.settings import TrainSettings
from mqmk.matcher.prompted_vit import FrozenViT

Family = Literal["prompts", "pool", "statistics", "reference"]


@dataclass(frozen=True)
class MethodSettings:
    """What is the same for every method of a table, and the one factor that is chosen for each."""

    train: TrainSettings = field(default_factory=TrainSettings)
    """Epochs, batch, augmentation, spread of new prompts and seed; the rest is for methods that train our pool."""
    rate: float = 1.0
    """The learning rate, in learning rates of the reference."""
    width: int = 2000
    """Random features of a regression; 0 takes the features themselves."""
    replay: int = 64
    """Samples of each class that are drawn when a head is trained on statistics."""
    replay_epochs: int = 10


@dataclass(frozen=True, eq=False)
class Answer:
    """What a method says about a batch of images."""

    scores: Float[Tensor, "batch classes"]
    """One column for each class seen, in the order of learning; -inf for a class that cannot win."""
    matched_task: Int[Tensor, " batch"] | None = None
    """The task that the method itself chose; None where it chooses none."""
    all_scores: Float[Tensor, "batch classes"] | None = None
    """Where `scores` leave out the classes of other tasks: those of all classes."""


@runtime_checkable
class Method(Protocol):
    """A way to learn a stream of tasks on a frozen ViT."""

    @property
    def trained(self) -> int:
        """How many numbers the last task trained."""

    def learn(self, task: Task) -> None:
        """Learn one more task from its training images alone."""

    def predict(self, images: Float[Tensor, "batch 3 height width"]) -> Answer:
        """Score images; what it says about one does not depend on the others."""

    def kept(self) -> dict[str, Tensor]:
        """Everything that is kept between tasks. Names that begin with `taskN/` never change after task N."""


@dataclass(frozen=True)
class Published:
    """Final accuracy in per cent as others printed it; other weights, splits and epochs than ours."""

    source: str
    cifar100: float | None = None
    imagenet_r: float | None = None
    domainnet: float | None = None
    matching_cifar100: float | None = None
    matching_imagenet_r: float | None = None
    matching_domainnet: float | None = None
    """All of these of 10 tasks."""
    imagenet_r_5: float | None = None
    """Of 5 tasks."""
    imagenet_r_20: float | None = None
    """Of 20 tasks."""


@dataclass(frozen=True)
class MethodInfo:
    """A row of the comparison."""

    name: str
    family: Family
    description: str
    create: Callable[[FrozenViT, MethodSettings], Method]
    published: Published | None = None
    deviations: tuple[str, ...] = ()
    """Where this is not what was published, and why."""
    searches_rate: bool = False
    """Whether the learning rate is chosen on a part of the first task's training images."""
    epoch_passes: tuple[float, float] = (0.0, 0.0)
    """For an estimate of time: passes an image and epoch, forward and back, on the first task and on later ones."""
    test_passes: float = 0.0
    """Likewise: passes a test image whenever it is scored, without what never changes and is computed once."""
    rounds: int = 2
    """Passes that must follow one another to answer, if all that need not run at once."""
    shares_pool: bool = False
    """Whether it trains the pool that others train, too: the first one does."""
    is_joint: bool = False
    """Whether it gets all tasks as one: a reference, which a stream never allows."""
    is_leaky: bool = False
    """Whether it reproduces the batch bug of published codes: tested with batches of one task, for comparison only."""
