"""Patch dropout: a training step computes a random share of an image's patches, and takes as much less time.

It also augments, as crops do. Serving and the keys it compares with use all patches.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.matcher.prompted_vit import FrozenViT, Projected, Stem


def drop_patches(vit: FrozenViT, embedded: Stem, share: float, generator: torch.Generator | None) -> Stem:
    """The embedded images with a random share of their patches each; the class token always stays."""
    prefix: int = vit._vit.num_prefix_tokens
    patches = embedded.hidden.shape[1] - prefix
    kept = max(1, round(share * patches))
    if kept == patches:
        return embedded
    drawn = torch.rand(len(embedded), patches, generator=generator).topk(kept, dim=1).indices + prefix
    always = torch.arange(prefix).expand(len(embedded), prefix)
    index = torch.cat([always, drawn], dim=1).to(embedded.hidden.device)
    projected = Projected(*(_select_tokens(part, index) for part in _parts(embedded.projected)))
    return Stem(embedded.layer, _select_tokens(embedded.hidden, index), projected)


def _parts(projected: Projected) -> tuple[Tensor, Tensor, Tensor]:
    return projected.q, projected.k, projected.v


def _select_tokens(
    values: Float[Tensor, "batch *heads tokens width"], index: Int[Tensor, "batch kept"]
) -> Float[Tensor, "batch *heads kept width"]:
    """The tokens of each image that its row of `index` names."""
    if values.ndim == 4:  # [batch, heads, tokens, width]
        index = index[:, None].expand(-1, values.shape[1], -1)
    return values.gather(-2, index[..., None].expand(*index.shape, values.shape[-1]))
