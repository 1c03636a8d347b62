"""Which frozen ViT to use and where its weights come from: embedded, a safetensors file, or the model hub.

The only file that imports timm. Whatever the source, the weights are one safetensors file, and its sha256 is the
backbone's identity: a pool trained on one refuses to load on another.
"""

import hashlib
import os
from collections.abc import Callable
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from mqmk.matcher import torchvision_on_cpu
from mqmk.matcher.errors import BackboneError
from mqmk.matcher.prompted_vit import BackboneInfo, FrozenViT
from mqmk.matcher.sketch_stem import IMAGE_SIZE, SketchStem

torchvision_on_cpu.register_missing_operators()
import timm  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

EMBEDDED: Final = "embedded"
HUB: Final = "hub"
RANDOM: Final = "random"
EMBEDDED_MEAN, EMBEDDED_STD = 1.0, 0.35  # white paper is 0, so a convolution's zero padding is paper


def embedded_vit(embed_layer: Callable[..., nn.Module] = SketchStem, drop_path_rate: float = 0.0) -> Any:
    """The architecture of the embedded backbone, without its weights."""
    return VisionTransformer(
        img_size=IMAGE_SIZE, patch_size=7, num_classes=0, embed_dim=128, depth=6, num_heads=4,
        embed_layer=embed_layer, drop_path_rate=drop_path_rate,
    )  # fmt: skip


def best_device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_backbone(
    name: str = EMBEDDED,
    *,
    weights: str | Path = HUB,
    sha256: str | None = None,
    image_size: int | None = None,
    device: torch.device | None = None,
) -> FrozenViT:
    """A frozen ViT, checked to compute what timm computes.

    `weights` is a safetensors file, HUB (the file that timm names for this model), or RANDOM for speed measurements.
    With `image_size` the position embedding is resampled. `sha256` pins the file.
    """
    if name == EMBEDDED:
        vit, info = _load_embedded(image_size)
    elif weights == RANDOM:
        vit, info = _create_random(name, image_size)
    else:
        path = _download_from_hub(name) if weights == HUB else Path(weights)
        vit, info = _load_file(name, path, image_size)
    if sha256 is not None and sha256 != info.weights_sha256:
        raise BackboneError(
            f"{name}: expected weights with sha256 {sha256}, but they have {info.weights_sha256}. "
            "Use the file the pool was trained with, or correct the configured sha256."
        )
    backbone = FrozenViT(vit, info, device or best_device())
    _check_against_timm(vit, backbone)
    return backbone


def _load_embedded(image_size: int | None) -> tuple[nn.Module, BackboneInfo]:
    if image_size not in (None, IMAGE_SIZE):
        raise BackboneError(f"the embedded backbone takes {IMAGE_SIZE} px images; leave image_size out")
    path = Path(str(files(__package__).joinpath("embedded", "backbone.safetensors")))
    vit = embedded_vit()
    _load_weights(vit, EMBEDDED, path)
    return vit, BackboneInfo(EMBEDDED, _file_sha256(path), IMAGE_SIZE, (EMBEDDED_MEAN,) * 3, (EMBEDDED_STD,) * 3)


def _create_random(name: str, image_size: int | None) -> tuple[nn.Module, BackboneInfo]:
    torch.manual_seed(0)
    vit = _create(name, image_size)
    digest = hashlib.sha256()
    for key, value in sorted(vit.state_dict().items()):
        digest.update(key.encode())
        digest.update(value.numpy().tobytes())
    return vit, _describe(vit, name, digest.hexdigest())


def _load_file(name: str, path: Path, image_size: int | None) -> tuple[nn.Module, BackboneInfo]:
    if path.suffix != ".safetensors":
        raise BackboneError(f"{path}: expected a .safetensors file; other formats can run code when they are read")
    if not path.is_file():
        raise BackboneError(f"{path}: no such file")
    with torch.device("meta"):  # refused before its weights are read: timm would warn of every key that differs
        _create(name, image_size)
    overlay = {"file": str(path), "custom_load": False}  # some names would otherwise expect JAX's .npz
    try:
        vit = _create(name, image_size, pretrained=True, pretrained_cfg_overlay=overlay)
    except BackboneError:
        raise
    except Exception as error:
        raise BackboneError(f"{path}: these are not weights for {name}: {_first_line(error)}") from error
    return vit, _describe(vit, name, _file_sha256(path))


def _download_from_hub(name: str) -> Path:
    """The safetensors file on the model hub that timm names for this model, downloaded or from the cache."""
    config = _create(name, None).pretrained_cfg
    if not config.get("hf_hub_id"):
        raise BackboneError(f"{name}: timm names no file on the model hub; give `weights` a safetensors file")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(config["hf_hub_id"], "model.safetensors"))
    except Exception as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise BackboneError(
            f"{name}: the model hub is not reachable{offline}: {_first_line(error)}. Copy model.safetensors of "
            f"{config['hf_hub_id']} to this machine and give its path as `weights`, or use the backbone `{EMBEDDED}`."
        ) from error


def _create(name: str, image_size: int | None, **options: Any) -> Any:
    """timm's model of that name without a head; anything but a ViT with a class token is refused."""
    if not timm.is_model(name):
        near = get_close_matches(name.split(".")[0], timm.list_models(module="vision_transformer"), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else "; `embedded` and timm's ViT names are known"
        raise BackboneError(f"no backbone is called {name!r}{hint}")
    size = {} if image_size is None else {"img_size": image_size}
    try:
        vit = timm.create_model(name, num_classes=0, **size, **options)
    except TypeError as error:
        raise BackboneError(f"{name}: not a ViT that takes an image size ({_first_line(error)})") from error
    if not isinstance(vit, VisionTransformer):
        raise BackboneError(f"{name} is a {type(vit).__name__}, and prompts need a ViT such as vit_base_patch16_224")
    if not vit.has_class_token:
        raise BackboneError(f"{name} has no class token, which is the query; try vit_base_patch16_224")
    return vit


def _describe(vit: Any, name: str, sha256: str) -> BackboneInfo:
    config = vit.pretrained_cfg
    size = vit.patch_embed.img_size[0]
    return BackboneInfo(name, sha256, size, tuple(config["mean"]), tuple(config["std"]), config["crop_pct"])


def _load_weights(vit: nn.Module, name: str, path: Path) -> None:
    from safetensors.torch import load_file

    try:
        vit.load_state_dict(load_file(path))
    except (OSError, RuntimeError) as error:
        raise BackboneError(f"{path}: these are not weights for {name}: {_first_line(error)}") from error


@torch.no_grad()
def _check_against_timm(vit: Any, backbone: FrozenViT) -> None:
    """Without prompts our pass must equal timm's: refuses any architecture that we would silently compute wrongly."""
    height, width = vit.patch_embed.img_size
    images = torch.linspace(-1, 1, 3 * height * width, device=backbone.device).sin().reshape(1, 3, height, width)
    with backbone.autocast():
        expected = vit.forward_features(images)[:, 0].float()
    try:
        difference = (backbone.plain(images) - expected).abs().max() / expected.abs().max()
    except (AttributeError, RuntimeError) as error:
        raise BackboneError(f"{backbone.info.name}: its blocks are not those of a plain ViT: {error}") from error
    if not difference < (2e-2 if backbone.device.type == "cuda" else 1e-4):
        raise BackboneError(f"{backbone.info.name}: its blocks are not those of a plain ViT (off by {difference:.1e})")


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_line(error: Exception) -> str:
    """What it says first; torch heads a list of differences with a line that ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:300]
