"""A training step that looks at some patches sees real tokens, always the class token, and others for each image."""

import pytest
import torch
from support.builders import SHAPES, frozen, random_images, random_timm_vit

from mqmk.learner.training.patches import drop_patches
from mqmk.matcher.prompted_vit import Stem

PATCHES = 9  # of an image of 12 px


def drawn(shape="plain", share=0.5, seed=0, batch=5):
    vit = frozen(random_timm_vit(shape))
    embedded = vit.embed(random_images(batch))
    return vit, embedded, drop_patches(vit, embedded, share, torch.Generator().manual_seed(seed))


def places(embedded: Stem, some: Stem, image: int) -> list[int]:
    """Where each kept token stood."""
    return [int((embedded.hidden[image] == token).all(dim=1).nonzero()[0]) for token in some.hidden[image]]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_class_token_stays_and_patches_are_drawn_without_repeating(shape):
    vit, embedded, some = drawn(shape)
    prefix = vit.tokens - PATCHES
    for image in range(len(some)):
        found = places(embedded, some, image)
        assert found[:prefix] == list(range(prefix))
        assert len(found) == len(set(found)) == prefix + round(0.5 * PATCHES)


def test_projections_go_with_their_tokens():
    _, embedded, some = drawn()
    for image in range(len(some)):
        found = places(embedded, some, image)
        for name in ("q", "k", "v"):
            mine, theirs = getattr(some.projected, name)[image], getattr(embedded.projected, name)[image]
            assert torch.equal(mine, theirs[:, found])


def test_images_differ_and_the_same_random_numbers_draw_the_same_patches():
    _, embedded, some = drawn(share=0.4)
    assert len({tuple(sorted(places(embedded, some, image))) for image in range(len(some))}) > 1
    torch.manual_seed(0)
    _, again, same = drawn(share=0.4)
    torch.manual_seed(0)
    _, _, other = drawn(share=0.4, seed=1)
    torch.manual_seed(0)
    _, _, once_more = drawn(share=0.4)
    assert torch.equal(same.hidden, once_more.hidden)
    assert not torch.equal(same.hidden, other.hidden)
    assert len(again) == 5


def test_all_patches_are_left_as_they_are_and_one_is_the_least():
    vit, embedded, whole = drawn(share=1.0)
    assert whole is embedded
    assert drop_patches(vit, embedded, 0.01, None).hidden.shape[1] == vit.tokens - PATCHES + 1
