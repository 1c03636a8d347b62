"""Where exactly the prefix enters, checked against attention computed by hand."""

import math

import pytest
import torch
from support.builders import SHAPES, frozen, random_images, random_pool, random_timm_vit
from torch import nn

from mqmk.matcher.backbone import VisionTransformer
from mqmk.matcher.prompted_vit import Prompt


def transparent_vit(heads: int, dim: int) -> nn.Module:
    """One block that does nothing but attend: queries, keys and values are the tokens, the rest is identity or zero."""
    vit = VisionTransformer(img_size=2, patch_size=2, num_classes=0, embed_dim=dim, depth=1, num_heads=heads)
    block = vit.blocks[0]
    block.norm1, block.norm2, vit.norm = nn.Identity(), nn.Identity(), nn.Identity()
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.zero_()
        block.attn.qkv.weight.copy_(torch.eye(dim).repeat(3, 1))
        block.attn.proj.weight.copy_(torch.eye(dim))
    return vit


def test_the_prefix_enters_after_the_projection_as_separate_key_and_value_rows():
    vit = transparent_vit(heads=1, dim=2)
    with torch.no_grad():
        vit.cls_token.copy_(torch.tensor([[[1.0, 2.0]]]))
        vit.patch_embed.proj.bias.copy_(torch.tensor([3.0, -1.0]))
    key_row, value_row = [0.5, 0.25], [7.0, -4.0]
    backbone = frozen(vit)
    prompt = Prompt((0,), (torch.tensor([[[key_row], [value_row]]]),))
    found = backbone.query(backbone.stem(backbone.embed(torch.zeros(1, 3, 2, 2)), None, 0), prompt)

    # The class token (1, 2) asks the prefix key (0.5, 0.25), itself and the patch (3, -1): dot products 1, 5, 1.
    weights = [math.exp(dot / math.sqrt(2)) for dot in (1.0, 5.0, 1.0)]
    values = [value_row, [1.0, 2.0], [3.0, -1.0]]
    mixed = [sum(w * v[i] for w, v in zip(weights, values, strict=True)) / sum(weights) for i in (0, 1)]
    assert found[0].tolist() == pytest.approx([1.0 + mixed[0], 2.0 + mixed[1]], abs=1e-5)


def test_the_prefix_is_split_into_heads_like_the_tokens():
    vit = transparent_vit(heads=2, dim=4)
    with torch.no_grad():
        vit.cls_token.copy_(torch.tensor([[[1.0, 0.0, 0.0, 2.0]]]))
    key_row, value_row = [3.0, 0.0, 0.0, -1.0], [10.0, 20.0, 30.0, 40.0]
    backbone = frozen(vit)
    prompt = Prompt((0,), (torch.tensor([[[key_row], [value_row]]]),))
    found = backbone.query(backbone.stem(backbone.embed(torch.zeros(1, 3, 2, 2)), None, 0), prompt)

    # Head 1 sees the first two numbers of everything, head 2 the last two; the patch token is zero.
    scale = 1 / math.sqrt(2)
    first = [math.exp(dot * scale) for dot in (3.0, 1.0, 0.0)]  # prefix, class token, patch
    second = [math.exp(dot * scale) for dot in (-2.0, 4.0, 0.0)]
    expected = [
        1.0 + (first[0] * 10.0 + first[1] * 1.0) / sum(first),
        0.0 + first[0] * 20.0 / sum(first),
        0.0 + second[0] * 30.0 / sum(second),
        2.0 + (second[0] * 40.0 + second[1] * 2.0) / sum(second),
    ]
    assert found[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_prompts_the_query_is_timms_class_token(shape):
    vit = random_timm_vit(shape)
    images = random_images(3)
    torch.testing.assert_close(frozen(vit).plain(images), vit.eval().forward_features(images)[:, 0])


def test_gradients_reach_the_prompts_and_never_the_backbone():
    vit = random_timm_vit()
    backbone = frozen(vit)
    g = torch.randn(2, 2, 5, 32, requires_grad=True)
    e = torch.randn(2, 2, 3, 32, requires_grad=True)
    stem = backbone.stem(backbone.embed(random_images(2)), Prompt((0, 1), (g,)), 2)
    backbone.query(stem, Prompt((2, 3), (e,))).square().sum().backward()
    assert g.grad is not None
    assert e.grad is not None
    assert (g.grad.abs().sum(dim=(2, 3)) > 0).all()  # every layer, key rows and value rows
    assert (e.grad.abs().sum(dim=(2, 3)) > 0).all()
    assert all(parameter.grad is None for parameter in vit.parameters())


def test_a_stem_may_name_an_image_more_than_once():
    backbone = frozen(random_timm_vit())
    pool = random_pool((2, 3), vit=backbone)
    stem = backbone.stem(backbone.embed(random_images(3)), pool.g, 2)
    rows = backbone.query(stem.rows(torch.tensor([2, 2, 0])), pool.g, pool.e_rows(torch.tensor([0, 1, 1])))
    first = backbone.query(stem, pool.g, pool.e(0))
    second = backbone.query(stem, pool.g, pool.e(1))
    torch.testing.assert_close(rows, torch.stack([first[2], second[2], second[0]]), atol=1e-5, rtol=1e-5)


def test_no_attribute_is_needed_that_the_oldest_supported_timm_lacks():
    vit = random_timm_vit()
    images = random_images(2)
    expected = frozen(vit).plain(images)
    for block in vit.blocks:
        vars(block.attn).pop("attn_dim", None)  # since timm 1.0.23
    assert torch.equal(frozen(vit).plain(images), expected)
