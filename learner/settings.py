"""What a user may choose about reading, checking and learning a task. No heavy imports: the command line reads it."""

from dataclasses import dataclass, field
from typing import Final, Literal

Policy = Literal["warn", "reject"]


@dataclass(frozen=True)
class ShardLimits:
    """What a task may cost, and the least it must bring."""

    members: int = 1_000_000  # files in one shard
    member_bytes: int = 16 * 2**20
    shard_bytes: int = 8 * 2**30
    pixels: int = 40_000_000  # of one picture, from its header
    seconds: float = 3600.0  # to read and check one shard; a read that never returns is for the opener to end
    min_samples: int = 2  # of every class, held-out ones included


DEFAULT_LIMITS: Final = ShardLimits()


@dataclass(frozen=True)
class SimilaritySettings:
    """What counts as nearly the same and as extreme."""

    near_bits: int | None = 5  # of 63; None looks for exact duplicates only
    imbalance: float = 50.0  # samples of the largest class for each of the smallest


@dataclass(frozen=True)
class Augmentation:
    """How much variation."""

    least_area: float = 0.5
    """The smallest crop, as a share of the picture; 1 turns crops off. The paper has 0.05 with hundreds of epochs."""
    mirror: bool = True


@dataclass(frozen=True)
class TrainSettings:
    """How a task is learned. What was measured of these is in docs/accuracy.md."""

    epochs: int = 6
    batch: int = 64
    accumulate: int = 1
    """Batches whose gradients are added up for one step; batch / accumulate images are in memory at a time."""
    learning_rate: float = 0.06
    clip: float = 1.0
    g_length: int = 5
    e_length: int = 20
    start: Literal["first", "previous", "random"] = "first"
    """What a new e-prompt is a copy of. Only `first` keeps tasks independent of each other and of their order."""
    spread: float = 0.05
    """Random prompts begin in +-spread."""
    g_prompt: Literal["first", "always"] = "first"
    """When the g-prompt is trained. Only `first` leaves old tasks' queries untouched."""
    keys: Literal["closed-form", "learned"] = "closed-form"
    keys_per_task: int | None = None
    head_scale: float = 16.0
    balanced: bool = False
    """Show rare classes as often as common ones."""
    patience: int | None = None
    """Stop after this many epochs without a better held-out accuracy, and keep the best; None trains to the end."""
    plain_means: bool = True
    """Also compute what ridge and the single-query baselines need: one more pass over the data."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    patches: float = 1.0
    """Share of a picture's patches that a training step looks at, drawn anew each time; keys and means see all."""
    e_layers: tuple[int, ...] | None = None
    """Blocks with an e-prompt; None takes all from the third to the last but one. Fixed by the pool's first task."""
    seed: int = 0
