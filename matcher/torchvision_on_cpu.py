"""Lets torchvision be imported beside a CPU build of torch.

The package index carries torchvision built for CUDA. Beside a CPU torch its compiled operators cannot load, and its
import then fails because `torchvision::nms` is unknown. Nothing here calls those operators, so their schemas alone are
registered. Every process that needs timm passes through `matcher.backbone`, which imports this file first.
"""

import torch

_schemas: list[torch.library.Library] = []  # the registration lives as long as the Library object


def register_missing_operators() -> None:
    """Declare torchvision's two operators; a no-op with a CUDA or ROCm build of torch."""
    if torch.version.cuda or torch.version.hip or _schemas:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.append(library)
