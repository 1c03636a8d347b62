"""What a user may choose about reading, checking and learning a task. No heavy imports: the command line reads it."""

from dataclasses import dataclass, field
from typing import Final, Literal

from mqmk.learner.errors import LearnerError, SettingsError
from mqmk.matcher.image_formats import ExtraFormat

Policy = Literal["warn", "reject"]
BadSamples = Literal["reject", "skip"]


@dataclass(frozen=True)
class ShardLimits:
    """Upper limits of a task, and the fewest samples of a class."""

    members: int = 1_000_000  # files in one shard
    member_bytes: int = 16 * 2**20
    shard_bytes: int = 8 * 2**30
    pixels: int = 40_000_000  # of one image, from its header
    seconds: float = 3600.0  # to read and check one shard; the opener must end a read that never returns
    min_samples: int = 2  # of every class, held-out ones included
    formats: tuple[ExtraFormat, ...] | None = None  # besides JPEG, PNG and WebP


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
    """The smallest crop, as a share of the image; 1 turns crops off. The paper has 0.05 with hundreds of epochs."""
    mirror: bool = True


@dataclass(frozen=True)
class TrainSettings:
    """How a task is learned. What was measured of these is in docs/accuracy.md."""

    epochs: int | None = None
    """Passes over a task's images; none takes as many as `steps` and `anchor_steps` need."""
    steps: int = 250
    """Least number of optimiser steps that a task gets, at least one pass: steps count, not passes."""
    batch: int = 16
    accumulate: int = 1
    """Least number of parts of a batch whose gradients are added up for one step; large images need more parts."""
    learning_rate: float = 0.06
    schedule: Literal["cosine", "constant"] = "cosine"
    """How the learning rate goes on: down to 0 along half a cosine, or not at all, as published."""
    clip: float = 1.0
    g_length: int = 5
    e_length: int = 20
    """Rows of an e-prompt in each of its blocks. Fixed by the pool's first task."""
    anchor_length: int = 60
    """Rows of the anchor prompt in each of its blocks. It is trained with the pool's first task, then frozen."""
    anchor_steps: int = 1000
    """Least number of steps that the anchor prompt gets; 0 trains none, and `anchor` and `fused` cannot be used."""
    start: Literal["first", "previous", "random"] = "first"
    """What a new e-prompt is a copy of. Only `first` keeps tasks independent of each other and of their order."""
    spread: float = 0.05
    """Random prompts begin in +-spread."""
    g_prompt: Literal["first", "always"] = "first"
    """When the g-prompt is trained. `always` changes the answers of old tasks: only `bench accuracy` takes it."""
    keys: Literal["closed-form", "learned"] = "closed-form"
    keys_per_task: int | None = None
    """At most this many keys for a task, one for each group of classes; None keeps one for each class."""
    head: Literal["normalised", "free"] = "normalised"
    """Rows of the head: of unit length, times `head_scale`; or of any length, without a scale, as published. Fixed by
    the pool's first task."""
    head_scale: float = 16.0
    balanced: bool = False
    """Show rare classes as often as common ones."""
    patience: int | None = None
    """Epochs without a better accuracy on a tenth of the training images, set aside for this, before training stops."""
    plain_means: bool = True
    """Also compute what the single-query baselines need: one more pass over the data."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    patches: float = 1.0
    """Share of an image's patches that a training step computes, drawn anew each time; keys and means use all."""
    e_layers: tuple[int, ...] | None = None
    """Blocks with an e-prompt; None takes all from the third to the last but one. Fixed by the pool's first task."""
    seed: int = 0


def check_settings(settings: TrainSettings, depth: int) -> None:
    """Refuse what cannot work with a backbone of this depth, whatever the task."""
    layers = settings.e_layers
    if layers is None or (layers and list(layers) == sorted({*layers} & {*range(depth)})):
        return
    raise SettingsError(
        f"e_layers: expected rising numbers of blocks from 0 to {depth - 1} (the backbone has {depth} blocks), "
        f"got {','.join(map(str, layers)) or 'none of them'}; use {','.join(map(str, default_e_layers(depth)))}, "
        "or leave it unset"
    )


def check_training(settings: TrainSettings, depth: int, classes: int, samples: int) -> None:
    """Refuse, before any training, what cannot work with this backbone or with a task of this size."""
    check_settings(settings, depth)
    if not samples or not classes:
        raise LearnerError(f"expected images to train on, got {samples} of {classes} classes; give every class some")


def default_e_layers(depth: int) -> tuple[int, ...]:
    """All blocks from the third to the last but one, or the last of a backbone that has none of those."""
    return tuple(range(2, depth - 1)) or (depth - 1,)
