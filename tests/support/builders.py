"""Small random backbones and pools for tests."""

from typing import Any

import torch
from torch import nn

from mqmk.matcher.backbone import VisionTransformer  # timm's, once it can be imported
from mqmk.matcher.pool import PromptPool, TaskPrompt
from mqmk.matcher.prompted_vit import BackboneInfo, FrozenViT

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer-scale-and-registers": {"init_values": 0.5, "reg_tokens": 3, "no_embed_class": True},
    "normalised-queries-and-keys": {"qk_norm": True, "pre_norm": True},
    "without-bias": {"qkv_bias": False, "scale_attn_norm": True},
}


def random_timm_vit(shape: str = "plain", *, dim: int = 32, depth: int = 4, heads: int = 4) -> nn.Module:
    """A ViT whose every parameter is random, so that none can be left out unnoticed."""
    vit = VisionTransformer(
        img_size=12, patch_size=4, num_classes=0, embed_dim=dim, depth=depth, num_heads=heads, **SHAPES[shape]
    )
    with torch.no_grad():
        for name, parameter in vit.named_parameters():
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(around, 0.3)
    return vit


def frozen(vit: nn.Module) -> FrozenViT:
    """That ViT as the matchers take it."""
    info = BackboneInfo("random", "0" * 64, 12, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return FrozenViT(vit, info, torch.device("cpu"))


def random_task(name: str, classes: int, *, keys: int | None = None, layers: int = 2, length: int = 3, dim: int = 32,
                spread: float = 1.0) -> TaskPrompt:  # fmt: skip
    """A task whose prompt is strong enough to change every answer."""
    class_samples = tuple(10 + 30 * (number % 3) for number in range(classes))  # classes are seldom of one size
    seen = torch.rand(20, 24).half().float()  # features of 20 images, for the regression
    return TaskPrompt(
        name=name,
        classes=tuple(f"{name}-{i}" for i in range(classes)),
        e_prompt=torch.randn(layers, 2, length, dim) * spread,
        keys=torch.randn(keys or classes, dim),
        head=torch.randn(classes, dim),
        means=torch.randn(classes, dim),
        plain_means=torch.randn(classes, dim),
        factor=seen,
        residual=torch.rand(1, 24).half().float(),
        feature_means=torch.rand(classes, 24).half().float(),
        manifest_sha256="ab" * 32,
        samples=sum(class_samples),
        class_samples=class_samples,
        trained_at="2026-01-01T00:00:00Z",
        metrics={"accuracy": 0.5},
    )


def random_pool(
    classes: tuple[int, ...],
    *,
    vit: FrozenViT,
    g_layers: tuple[int, ...] = (0, 1),
    e_layers: tuple[int, ...] = (2, 3),
    length: int = 3,
) -> PromptPool:
    """A pool with one task for each number of classes."""
    shared = torch.randn(len(g_layers), 2, 5, vit.dim), torch.randn(len(e_layers), 2, 4, vit.dim)
    pool = PromptPool(vit.info, g_layers, e_layers, shared[0], anchor=shared[1])
    for number, count in enumerate(classes):
        task = random_task(f"task{number}", count, layers=len(e_layers), length=length, dim=vit.dim)
        pool = pool.with_task(task)
    return pool


def random_images(batch: int, size: int = 12) -> torch.Tensor:
    """Images of noise."""
    return torch.randn(batch, 3, size, size)
