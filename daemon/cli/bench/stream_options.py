"""The options that benchmarks over a stream of tasks share: which images, which backbone, how long."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mqmk.learner.bench.presets import PRESETS
from mqmk.learner.settings import TrainSettings

if TYPE_CHECKING:
    from mqmk.learner.data.streams import StreamSettings
    from mqmk.matcher.prompted_vit import FrozenViT

F = TypeVar("F", bound=Callable[..., Any])
DEFAULTS = TrainSettings()

_OPTIONS = (
    click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True,
                 help="Folder with train/CLASS/* and test/CLASS/*."),
    click.option("--preset", type=click.Choice(list(PRESETS)),
                 help="Settings of the paper; other options override them."),
    click.option("--tasks", type=click.IntRange(min=1), show_default="10", help="Number of tasks."),
    click.option("--backbone", show_default="embedded", help="`embedded` or a timm ViT."),
    click.option("--weights", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                 help="safetensors file of the backbone.  [default: from the model hub]"),
    click.option("--image-size", type=click.IntRange(min=8), help="Pixels.  [default: the backbone's own]"),
    click.option("--train-per-class", type=click.IntRange(min=1),
                 help="Maximum number of training images per class.  [default: all]"),
    click.option("--test-per-class", type=click.IntRange(min=1),
                 help="Maximum number of test images per class.  [default: all]"),
    click.option("--epochs", type=click.IntRange(min=1), help="Epochs per task.  [default: what --steps needs]"),
    click.option("--steps", type=click.IntRange(min=1), show_default=str(DEFAULTS.steps),
                 help="Minimum number of optimiser steps per task."),
    click.option("--batch", type=click.IntRange(min=1), show_default=str(DEFAULTS.batch), help="Images per step."),
    click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True,
                 help="Number of runs, each with its own seed."),
)  # fmt: skip


def stream_options(command: F) -> F:
    """Add the options, in this order."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_stream_settings(chosen: dict[str, Any]) -> "StreamSettings":
    """Options override the preset, and the preset overrides the defaults."""
    from mqmk.learner.data.streams import StreamSettings

    preset = PRESETS.get(chosen["preset"] or "")
    return StreamSettings(
        data=chosen["data"],
        tasks=chosen["tasks"] or (preset.tasks if preset else 10),
        train_per_class=chosen["train_per_class"],
        test_per_class=chosen["test_per_class"],
        classes=preset.classes if preset else None,
        shuffle=preset is None,
        least_area=preset.least_area if preset else None,
    )


def read_train_settings(chosen: dict[str, Any], names: tuple[str, ...] = ("epochs", "steps", "batch")) -> TrainSettings:
    """Likewise, for the named options."""
    preset = PRESETS.get(chosen["preset"] or "")
    given = {name: chosen[name] for name in names if chosen[name] is not None}
    return replace(preset.train if preset else DEFAULTS, **given)


def load_vit(chosen: dict[str, Any]) -> "FrozenViT":
    """The backbone; with that of a preset, the paper's image preprocessing."""
    from mqmk.matcher.backbone import EMBEDDED, HUB, load_backbone
    from mqmk.matcher.prompted_vit import FrozenViT

    preset = PRESETS.get(chosen["preset"] or "")
    name = chosen["backbone"] or (preset.backbone if preset else EMBEDDED)
    size = chosen["image_size"] or (preset.image_size if preset else None)
    vit = load_backbone(name, weights=chosen["weights"] or HUB, image_size=size)
    if preset is None or name != preset.backbone:
        return vit
    info = replace(vit.info, mean=preset.mean, std=preset.std, crop=preset.crop)
    return FrozenViT(vit._vit, info, vit.device)
