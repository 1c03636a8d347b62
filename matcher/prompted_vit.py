"""What the frozen ViT computes with prompts: a query is its class token after the final norm.

A prompt of length L at a layer is L rows in front of the attention's keys and L other rows in front of its values,
after the projections and before the split into heads: k = [P_K ; x W_K], v = [P_V ; x W_V]. The sequence keeps its
length.

Three things make M queries of one image cheaper than M passes, none of them approximate: the layers below the first
e-prompt run once (`Stem`), so do the projections of the first layer that has one, and the last block computes the
class token only, because nothing reads the other tokens.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class BackboneInfo:
    """Which frozen ViT this is and how an image must be prepared for it; part of every pool file."""

    name: str
    weights_sha256: str
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    crop: float = 1.0  # share of the shorter side that the centre crop keeps


@dataclass(frozen=True)
class Prompt:
    """Rows for some layers: one entry that serves every image of a batch, or one entry for each image."""

    layers: tuple[int, ...]
    rows: tuple[Float[Tensor, "layers 2 length dim"], ...]  # axis 1: 0 = key rows, 1 = value rows

    def at(self, layer: int) -> Float[Tensor, "batch 2 length dim"] | None:
        """The rows of one layer; a batch axis of 1 when one entry serves all."""
        if layer not in self.layers:
            return None
        place = self.layers.index(layer)
        return self.rows[0][None, place] if len(self.rows) == 1 else torch.stack([r[place] for r in self.rows])


@dataclass(frozen=True)
class Projected:
    """Queries, keys and values of one layer, split into heads; in the last layer only the class token asks."""

    q: Float[Tensor, "batch heads asking width"]
    k: Float[Tensor, "batch heads tokens width"]
    v: Float[Tensor, "batch heads tokens width"]

    def rows(self, index: Int[Tensor, " rows"]) -> "Projected":
        """One entry for each index."""
        return Projected(self.q[index], self.k[index], self.v[index])


@dataclass(frozen=True)
class Stem:
    """What a forward pass computes whatever the task: the hidden states before `layer`, and its projections."""

    layer: int
    hidden: Float[Tensor, "batch tokens dim"]
    projected: Projected

    def __len__(self) -> int:
        return len(self.hidden)

    def rows(self, index: Int[Tensor, " rows"]) -> "Stem":
        """The stem of images[index], in that order; an image may be named more than once."""
        return replace(self, hidden=self.hidden[index], projected=self.projected.rows(index))


class FrozenViT:
    """A timm ViT that is never trained. Gradients flow through it to the prompts, never into it."""

    def __init__(self, vit: Any, info: BackboneInfo, device: torch.device) -> None:
        self._vit = vit.eval().requires_grad_(False).to(device)
        self.info = info
        self.device = device
        self.dim: int = vit.embed_dim
        self.depth: int = len(vit.blocks)
        self.tokens: int = vit.patch_embed.num_patches + vit.num_prefix_tokens

    def autocast(self) -> AbstractContextManager[None]:
        """Half precision where the device is fast at it."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def plain(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch dim"]:
        """The query without any prompt."""
        return self.query(self.embed(images))

    def embed(self, images: Float[Tensor, "batch 3 height width"]) -> Stem:
        """What is the same for every prompt, and for none: the patches, and the first layer's projections."""
        with self.autocast():
            vit = self._vit
            hidden = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))
            return Stem(0, hidden, self._project(0, hidden))

    def stem(self, embedded: Stem, g_prompt: Prompt | None, first_e_layer: int) -> Stem:
        """Everything below the first layer with an e-prompt, and that layer's projections."""
        with self.autocast():
            stem = embedded
            while stem.layer < first_e_layer:
                hidden = self._block(stem.layer, stem.hidden, stem.projected, g_prompt)
                stem = Stem(stem.layer + 1, hidden, self._project(stem.layer + 1, hidden))
            return stem

    def query(self, stem: Stem, *prompts: Prompt | None) -> Float[Tensor, "batch dim"]:
        """The rest of the forward pass: the class token after the final norm."""
        with self.autocast():
            return self._vit.norm(self.class_token(stem, *prompts)).float()

    def class_token(self, stem: Stem, *prompts: Prompt | None) -> Float[Tensor, "batch dim"]:
        """The same before the final norm."""
        with self.autocast():
            hidden = self._block(stem.layer, stem.hidden, stem.projected, *prompts)
            for layer in range(stem.layer + 1, self.depth):
                hidden = self._block(layer, hidden, self._project(layer, hidden), *prompts)
            return hidden[:, 0]

    def _project(self, layer: int, hidden: Float[Tensor, "batch tokens dim"]) -> Projected:
        block = self._vit.blocks[layer]
        attention = block.attn
        x = block.norm1(hidden)

        def heads(y: Float[Tensor, "batch n width"], parts: int) -> Float[Tensor, "parts batch heads n head_width"]:
            batch, n, _ = y.shape
            return y.reshape(batch, n, parts, attention.num_heads, -1).permute(2, 0, 3, 1, 4)

        if layer < self.depth - 1:
            return Projected(*heads(attention.qkv(x), 3))
        width, bias = attention.num_heads * attention.head_dim, attention.qkv.bias
        weight_q, weight_kv = attention.qkv.weight[:width], attention.qkv.weight[width:]
        bias_q, bias_kv = (None, None) if bias is None else (bias[:width], bias[width:])
        (q,) = heads(F.linear(x[:, :1], weight_q, bias_q), 1)
        return Projected(q, *heads(F.linear(x, weight_kv, bias_kv), 2))

    def _block(
        self, layer: int, hidden: Float[Tensor, "batch tokens dim"], projected: Projected, *prompts: Prompt | None
    ) -> Float[Tensor, "batch asking dim"]:
        block = self._vit.blocks[layer]
        attention = block.attn
        keys, values = [projected.k], [projected.v]
        for prompt in prompts:
            if prompt is not None and (rows := prompt.at(layer)) is not None:
                # [1 or batch, 2, length, dim] -> [batch, heads, length, head_width], a view where one prompt serves all
                split = rows.unflatten(-1, (attention.num_heads, -1)).transpose(2, 3)
                split = split.expand(len(hidden), *split.shape[1:]).to(projected.k.dtype)
                keys.insert(-1, split[:, 0])
                values.insert(-1, split[:, 1])
        k, v = (torch.cat(parts, dim=2) if len(parts) > 1 else parts[0] for parts in (keys, values))
        mixed = F.scaled_dot_product_attention(attention.q_norm(projected.q), attention.k_norm(k), v)
        mixed = mixed.transpose(1, 2).flatten(2)  # [batch, heads, asking, head_width] -> [batch, asking, dim]
        x = hidden[:, : mixed.shape[1]] + block.ls1(attention.proj(attention.norm(mixed)))
        return x + block.ls2(block.mlp(block.norm2(x)))
