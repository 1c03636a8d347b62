"""One key for several classes is the minimiser of the paper's matching loss over all their samples."""

import torch
from torch.nn import functional as F

from mqmk.matcher.keys import merge_keys

SIZES = (100, 10, 30)


def clouds() -> list[torch.Tensor]:
    """Unit vectors around a mean of their own for each class."""
    return [F.normalize(torch.randn(16) + 0.5 * torch.randn(size, 16), dim=1) for size in SIZES]


def test_the_key_of_a_group_minimises_the_matching_loss_over_all_its_samples():
    queries = clouds()
    means = torch.stack([cloud.mean(dim=0) for cloud in queries])
    key = merge_keys(means, SIZES, 1)[0]
    together = torch.cat(queries)

    def loss(k):
        return (1 - F.cosine_similarity(together, k[None])).sum()

    torch.testing.assert_close(F.normalize(key, dim=0), F.normalize(together.sum(dim=0), dim=0))
    assert loss(key) < loss(means.sum(dim=0))  # each class counted once, whatever its size
    for _ in range(20):
        assert loss(key + 0.05 * key.norm() * torch.randn(16)) > loss(key)


def test_groups_are_neighbouring_classes_and_as_many_keys_as_classes_are_the_means():
    means = torch.stack([cloud.mean(dim=0) for cloud in clouds()])
    first = (100 * means[0] + 10 * means[1]) / 110
    torch.testing.assert_close(merge_keys(means, SIZES, 2), torch.stack([first, means[2]]))
    assert torch.equal(merge_keys(means, SIZES, 3), means)


def test_classes_of_unknown_or_no_size_give_finite_keys():
    means = torch.randn(4, 16)
    torch.testing.assert_close(merge_keys(means, (), 2), torch.stack([means[:2].mean(dim=0), means[2:].mean(dim=0)]))
    assert torch.isfinite(merge_keys(means, (0, 0, 1, 1), 2)).all()
