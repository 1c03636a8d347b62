"""How a training picture is varied: a random crop of random shape, and a mirror image, on whole batches."""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.learner.settings import Augmentation


def augment(
    images: Float[Tensor, "batch 3 height width"], how: Augmentation, random: torch.Generator
) -> Float[Tensor, "batch 3 height width"]:
    """Another crop of each picture at the same size."""
    if how.least_area >= 1 and not how.mirror:
        return images
    batch = len(images)

    def uniform(low: float, high: float) -> Float[Tensor, " batch"]:
        return torch.empty(batch).uniform_(low, high, generator=random)

    area = uniform(how.least_area, 1.0)
    longest = math.log(4 / 3) if how.least_area < 1 else 0.0
    shape = uniform(-longest, longest).mul(0.5).exp()
    width, height = (area.sqrt() * shape).clamp(max=1.0), (area.sqrt() / shape).clamp(max=1.0)
    mirror = torch.where((uniform(0.0, 1.0) < 0.5) & how.mirror, -1.0, 1.0)
    across, down = uniform(-1.0, 1.0) * (1 - width), uniform(-1.0, 1.0) * (1 - height)
    none = torch.zeros(batch)
    crop = torch.stack([width * mirror, none, across, none, height, down], dim=1).reshape(batch, 2, 3)
    grid = F.affine_grid(crop.to(images.device), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
