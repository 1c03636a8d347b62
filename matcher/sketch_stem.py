"""How the embedded backbone turns a 28 px sketch into 16 tokens: a small convolutional stem in place of patches.

With so little data, a stem of 3x3 convolutions learns far better than a linear patch embedding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

IMAGE_SIZE = 28
_CHANNELS = (32, 64, 128, 128)
_STRIDES = (2, 1, 2, 1, 2)  # 28 -> 14 -> 14 -> 7 -> 7 -> 4


class SketchStem(nn.Module):
    """An embed layer for timm's VisionTransformer: five convolutions, GELU between them.

    `norms` are batch norms while the stem is pretrained; `fuse` folds them away, and only the fused stem is shipped.
    """

    def __init__(self, *, embed_dim: int, norms: Sequence[nn.Module] | None = None, **_ignored: object) -> None:
        super().__init__()
        self.num_patches, self.grid_size, self.patch_size = 16, (4, 4), (7, 7)
        self.img_size = (IMAGE_SIZE, IMAGE_SIZE)
        widths = (1, *_CHANNELS, embed_dim)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inward, outward, 3, stride, padding=1)
            for inward, outward, stride in zip(widths[:-1], widths[1:], _STRIDES, strict=True)
        )
        self.norms = nn.ModuleList(norms if norms is not None else [nn.Identity() for _ in _CHANNELS])

    def forward(self, images: Float[Tensor, "batch 3 28 28"]) -> Float[Tensor, "batch 16 dim"]:
        x = images.mean(dim=1, keepdim=True).contiguous(memory_format=torch.channels_last)
        for convolution, norm in zip(self.convolutions[:-1], self.norms, strict=True):
            x = nn.functional.gelu(norm(convolution(x)))
        return self.convolutions[-1](x).flatten(2).transpose(1, 2)  # [batch, dim, 4, 4] -> [batch, 16, dim]

    @classmethod
    def trainable(cls, *, embed_dim: int, **ignored: object) -> "SketchStem":
        """A stem with batch norms, for pretraining."""
        return cls(embed_dim=embed_dim, norms=[nn.BatchNorm2d(width) for width in _CHANNELS], **ignored)

    def fuse(self) -> "SketchStem":
        """The same function of the image with the batch norms folded into the convolutions."""
        convolutions: list[Any] = list(self.convolutions)
        norms: list[Any] = list(self.norms)
        stem = SketchStem(embed_dim=convolutions[-1].out_channels)
        folded = [fuse_conv_bn_eval(c.eval(), n.eval()) for c, n in zip(convolutions[:-1], norms, strict=True)]
        stem.convolutions = nn.ModuleList([*folded, convolutions[-1]])
        return stem
