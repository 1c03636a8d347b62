"""Augmentation of a training batch: random resized crops and horizontal flips."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.settings import Augmentation


def augment(
    images: Float[Tensor, "batch 3 height width"], how: Augmentation, generator: torch.Generator
) -> Float[Tensor, "batch 3 height width"]:
    """A random crop of each image, resized to the same size, half of them flipped."""
    min_scale, hflip = how.least_area, how.mirror
    if min_scale >= 1 and not hflip:
        return images
    batch = len(images)

    def uniform(low: float, high: float) -> Float[Tensor, " batch"]:
        return torch.empty(batch).uniform_(low, high, generator=generator)

    area = uniform(min_scale, 1.0)
    max_ratio = math.log(4 / 3) if min_scale < 1 else 0.0
    shape = uniform(-max_ratio, max_ratio).mul(0.5).exp()
    width, height = (area.sqrt() * shape).clamp(max=1.0), (area.sqrt() / shape).clamp(max=1.0)
    direction = torch.where((uniform(0.0, 1.0) < 0.5) & hflip, -1.0, 1.0)
    across, down = uniform(-1.0, 1.0) * (1 - width), uniform(-1.0, 1.0) * (1 - height)
    none = torch.zeros(batch)
    crop = torch.stack([width * direction, none, across, none, height, down], dim=1).reshape(batch, 2, 3)
    grid = F.affine_grid(crop.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
