"""Which patches of a picture a training step looks at: some, drawn at random, because a step costs what it looks at.

Half the patches cost half the time and vary the pictures as crops do; what the service computes, and the keys that
it compares with, come from all patches.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mqmk.matcher.prompted_vit import FrozenViT, Projected, Stem


def some_patches(vit: FrozenViT, embedded: Stem, share: float, random: torch.Generator | None) -> Stem:
    """The embedded pictures with a share of their patches, others for each; the class token always stays."""
    prefix: int = vit._vit.num_prefix_tokens
    patches = embedded.hidden.shape[1] - prefix
    kept = max(1, round(share * patches))
    if kept == patches:
        return embedded
    drawn = torch.rand(len(embedded), patches, generator=random).topk(kept, dim=1).indices + prefix
    always = torch.arange(prefix).expand(len(embedded), prefix)
    index = torch.cat([always, drawn], dim=1).to(embedded.hidden.device)
    projected = Projected(*(_picked(part, index) for part in _parts(embedded.projected)))
    return Stem(embedded.layer, _picked(embedded.hidden, index), projected)


def _parts(projected: Projected) -> tuple[Tensor, Tensor, Tensor]:
    return projected.q, projected.k, projected.v


def _picked(
    values: Float[Tensor, "batch *heads tokens width"], index: Int[Tensor, "batch kept"]
) -> Float[Tensor, "batch *heads kept width"]:
    """The tokens of each picture that its row of `index` names."""
    if values.ndim == 4:  # [batch, heads, tokens, width]
        index = index[:, None].expand(-1, values.shape[1], -1)
    return values.gather(-2, index[..., None].expand(*index.shape, values.shape[-1]))
