"""Which backbones load, and what is said about those that do not."""

import pytest
import torch
from safetensors.torch import save_file
from support.builders import frozen, random_images, random_pool
from support.reference import Naive

from mqmk.matcher import backbone as door
from mqmk.matcher.backbone import RANDOM, VisionTransformer, load_backbone
from mqmk.matcher.errors import BackboneError
from mqmk.matcher.matchers import MatchSettings, match_images

ResPostBlock = door.timm.models.vision_transformer.ResPostBlock

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "vit_small_patch16_224",
        "vit_base_patch16_224",
        "deit_tiny_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "deit3_small_patch16_224",
        "vit_small_patch14_dinov2",
        "vit_small_patch14_reg4_dinov2",
        "vit_base_patch32_clip_224",
    ],
)
def test_any_timm_vit_with_a_class_token_loads_at_another_image_size(name):
    size = 112 if "patch14" in name else 64
    backbone = load_backbone(name, weights=RANDOM, image_size=size, device=CPU)
    assert backbone.info.image_size == size
    assert backbone.plain(torch.zeros(1, 3, size, size)).shape == (1, backbone.dim)


def test_the_prompts_of_a_real_architecture_equal_the_naive_reference():
    backbone = load_backbone("vit_small_patch14_reg4_dinov2", weights=RANDOM, image_size=28, device=CPU)
    pool = random_pool((2, 3), vit=backbone, e_layers=(2, 5, 11))
    images = random_images(1, 28)
    found = match_images("mqmk", backbone, pool, images, MatchSettings())
    expected = Naive(backbone._vit, pool).match("mqmk", images[0])
    assert int(found.task[0]) == expected.task
    assert found.scores[0].tolist() == pytest.approx([expected.scores[0], expected.scores[1]], abs=1e-5)


def test_the_embedded_backbone_needs_no_network_and_has_a_fixed_hash():
    backbone = load_backbone(device=CPU)
    card = (door.files("mqmk.matcher") / "embedded" / "CARD.md").read_text()
    assert backbone.info.weights_sha256 in card
    assert (backbone.dim, backbone.depth, backbone.tokens) == (128, 6, 17)
    with pytest.raises(BackboneError, match="takes 28 px"):
        load_backbone(image_size=64)


def test_the_same_seed_gives_the_same_random_weights():
    first = load_backbone("vit_tiny_patch16_224", weights=RANDOM, image_size=32, device=CPU)
    second = load_backbone("vit_tiny_patch16_224", weights=RANDOM, image_size=32, device=CPU)
    assert first.info == second.info


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_bas_patch16_224", r"no backbone is called 'vit_bas_patch16_224'; did you mean vit_base_patch16_224"),
        ("qqqq", "no backbone is called 'qqqq'; `embedded` and timm's ViT names are known"),
        ("resnet18", "resnet18 is a ResNet, and prompts need a ViT"),
        ("swin_tiny_patch4_window7_224", "is a SwinTransformer"),
        ("vit_base_patch16_gap_224", "has no class token"),
    ],
)
def test_a_name_that_cannot_serve_is_refused_with_a_way_out(name, reason):
    with pytest.raises(BackboneError, match=reason):
        load_backbone(name, weights=RANDOM)


def test_blocks_that_we_would_compute_wrongly_are_refused():
    vit = VisionTransformer(img_size=12, patch_size=4, num_classes=0, embed_dim=32, depth=2, num_heads=2,
                            block_fn=ResPostBlock)  # fmt: skip
    with pytest.raises(BackboneError, match="its blocks are not those of a plain ViT"):
        door._check_against_timm(vit, frozen(vit))


def test_an_unreachable_hub_is_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(BackboneError, match=r"hub is not reachable.*give its path as `weights`, or .*`embedded`"):
        load_backbone("vit_tiny_patch16_224")


def test_a_file_is_checked_against_name_hash_and_kind(tmp_path):
    vit = door._create("vit_tiny_patch16_224", 32)
    path = tmp_path / "tiny.safetensors"
    save_file(vit.state_dict(), path)
    loaded = load_backbone("vit_tiny_patch16_224", weights=path, image_size=48, device=CPU)
    assert loaded.info.weights_sha256 == door._file_sha256(path)
    assert load_backbone("vit_tiny_patch16_224", weights=path, sha256=loaded.info.weights_sha256, image_size=32)
    with pytest.raises(BackboneError, match="expected weights with sha256 ffff"):
        load_backbone("vit_tiny_patch16_224", weights=path, sha256="f" * 64)
    with pytest.raises(
        BackboneError, match=r"these are not weights for vit_small_patch16_224: .*size mismatch for cls"
    ):
        load_backbone("vit_small_patch16_224", weights=path)
    with pytest.raises(BackboneError, match="no such file"):
        load_backbone("vit_tiny_patch16_224", weights=tmp_path / "gone.safetensors")
    path.write_bytes(b"not weights")
    with pytest.raises(BackboneError, match="these are not weights"):
        load_backbone("vit_tiny_patch16_224", weights=path)


def test_another_architecture_is_refused_without_a_list_of_every_key(tmp_path, caplog):
    path = tmp_path / "tiny.safetensors"
    save_file(door._create("vit_tiny_patch16_224", 32).state_dict(), path)
    with pytest.raises(BackboneError, match="resnet18 is a ResNet"):
        load_backbone("resnet18", weights=path)
    assert caplog.text == ""


def test_a_pickle_is_never_opened(tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(b"cposix\nsystem\n(S'touch opened'\ntR.")
    with pytest.raises(BackboneError, match=r"expected a .safetensors file"):
        load_backbone("vit_tiny_patch16_224", weights=path)


@pytest.mark.shared
def test_real_weights_recognise_what_they_were_trained_on(assets):
    path = assets / "deit_tiny_patch16_224.safetensors"
    backbone = load_backbone("deit_tiny_patch16_224", weights=path, device=CPU)
    small = load_backbone("deit_tiny_patch16_224", weights=path, image_size=112, device=CPU)
    assert backbone.info.weights_sha256 == small.info.weights_sha256
    assert backbone.info.weights_sha256.startswith("4b124d5ea465")
    assert (backbone.tokens, small.tokens) == (197, 50)
