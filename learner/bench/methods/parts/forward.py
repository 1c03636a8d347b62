"""Forward passes of the frozen ViT that only rivals need: inserted tokens, adapters, and all tokens of the last block.

Prefix prompts are `mqmk.matcher.prompted_vit`'s own. Inserted tokens get no position; they stay until the last block.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from mqmk.matcher.prompted_vit import FrozenViT


@dataclass(frozen=True, eq=False)
class Adapters:
    """A bottleneck beside the MLP of each block: scale * up(relu(down(h)))."""

    down: Float[Tensor, "layers dim bottleneck"]
    up: Float[Tensor, "layers bottleneck dim"]
    scale: float = 0.1

    @classmethod
    def new(cls, vit: FrozenViT, bottleneck: int, generator: torch.Generator) -> "Adapters":
        """Adapters that change nothing yet: Kaiming below, zero above."""
        bound = 1 / math.sqrt(vit.dim)
        down = torch.empty(vit.depth, vit.dim, bottleneck).uniform_(-bound, bound, generator=generator)
        return cls(down.to(vit.device), torch.zeros(vit.depth, bottleneck, vit.dim, device=vit.device))

    def at(self, layer: int, hidden: Float[Tensor, "batch tokens dim"]) -> Float[Tensor, "batch tokens dim"]:
        """What the adapter of a block adds."""
        return self.scale * F.relu(hidden @ self.down[layer]) @ self.up[layer]


def run_blocks(
    vit: FrozenViT,
    images: Float[Tensor, "batch 3 height width"],
    inserted: Mapping[int, Float[Tensor, "_ new dim"]] | None = None,
    adapters: Adapters | None = None,
) -> Float[Tensor, "batch tokens dim"]:
    """All tokens after the last block, before the final norm: class token, patches, then what was inserted.

    `inserted[layer]` joins the sequence before that block: one set for the batch, or one for each image.
    """
    inner: Any = vit._vit
    with vit.autocast():
        hidden = inner.norm_pre(inner.patch_drop(inner._pos_embed(inner.patch_embed(images))))
        for layer, block in enumerate(inner.blocks):
            if inserted and layer in inserted:
                hidden = torch.cat([hidden, inserted[layer].expand(len(images), -1, -1).to(hidden.dtype)], dim=1)
            attended = hidden + block.ls1(block.attn(block.norm1(hidden)))
            hidden = attended + block.ls2(block.mlp(block.norm2(attended)))
            if adapters:
                hidden = hidden + adapters.at(layer, attended)
        return hidden.float()


def final_norm(vit: FrozenViT, hidden: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """The ViT's last norm."""
    inner: Any = vit._vit
    return inner.norm(hidden).float()


def class_token(vit: FrozenViT) -> Float[Tensor, " dim"]:
    """The ViT's own class token, before any block."""
    inner: Any = vit._vit
    return inner.cls_token[0, 0].detach()


def num_heads(vit: FrozenViT) -> int:
    """Attention heads of a block."""
    inner: Any = vit._vit
    return inner.blocks[0].attn.num_heads


class PassMeter:
    """Counts what passes through the blocks, in plain queries of one image, whoever computes it.

    More tokens count in proportion; a last block that computes the class token only counts as next to nothing.
    `backward` counts the blocks that a gradient goes through. Prefix rows, heads and modules of a method's own are not
    counted: per cents of a pass. Meters may be nested.
    """

    _running: ClassVar[list["PassMeter"]] = []

    def __init__(self, vit: FrozenViT) -> None:
        inner: Any = vit._vit
        self._blocks = inner
        self._plain_tokens = vit.tokens * (vit.depth - 1) + 1
        self._mlps = [block.mlp for block in inner.blocks]
        self.forward, self.backward = 0.0, 0.0
        self.known_seconds = 0.0
        """Of training whose result was known."""

    def __enter__(self) -> "PassMeter":
        self._hooks = [mlp.register_forward_hook(self._count) for mlp in self._mlps]
        self._running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.remove(self)
        for hook in self._hooks:
            hook.remove()

    @classmethod
    def add(cls, vit: FrozenViT, forward: float, backward: float = 0.0, seconds: float = 0.0) -> None:
        """Count passes whose results were known, so that nothing was computed."""
        for meter in cls._running:
            if meter._blocks is vit._vit:
                meter.forward += forward
                meter.backward += backward
                meter.known_seconds += seconds

    def _count(self, _module: object, inputs: tuple[Tensor, ...], _output: object) -> None:
        share = inputs[0].shape[0] * inputs[0].shape[1] / self._plain_tokens
        self.forward += share
        self.backward += share if inputs[0].requires_grad else 0.0
