"""What benchmark methods share does what it says: forward passes, the meter, the loop, orthogonal rows, Gaussians."""

import dataclasses

import pytest
import torch
from support.builders import frozen, random_images, random_timm_vit
from support.method_tasks import QUICK, ragged_tasks
from torch.nn import functional as F

from mqmk.learner.bench.methods.parts.forward import Adapters, PassMeter, final_norm, run_blocks
from mqmk.learner.bench.methods.parts.gaussians import TaskGaussians, replay, shrunk_covariances
from mqmk.learner.bench.methods.parts.heads import LinearHead, keep_task, row_tasks, score_all
from mqmk.learner.bench.methods.parts.prompts import (
    choose,
    match_by_owner,
    orthogonal_rows,
    owner_of,
    split_rows,
)
from mqmk.learner.bench.methods.parts.training import Recipe, constant, cosine, fit, quarter_cosine
from mqmk.matcher.prompted_vit import Prompt


@pytest.fixture(scope="module", params=["plain", "layer-scale-and-registers", "normalised-queries-and-keys"])
def vit(request):
    torch.manual_seed(0)
    return frozen(random_timm_vit(request.param))


def test_without_insertions_the_blocks_give_the_plain_query(vit):
    images = random_images(3)
    torch.testing.assert_close(final_norm(vit, run_blocks(vit, images))[:, 0], vit.plain(images), atol=1e-5, rtol=1e-5)


def test_inserted_tokens_join_before_their_block_and_stay(vit):
    images, early, late = random_images(2), torch.randn(1, 3, vit.dim), torch.randn(2, 2, vit.dim)
    hidden = run_blocks(vit, images, {0: early, 2: late})
    assert hidden.shape[1] == vit.tokens + 3 + 2
    inner = vit._vit
    for number, image in enumerate(images):
        x = inner.norm_pre(inner._pos_embed(inner.patch_embed(image[None])))
        x = torch.cat([x, early], dim=1)
        for layer, block in enumerate(inner.blocks):
            x = torch.cat([x, late[number : number + 1]], dim=1) if layer == 2 else x
            x = block(x)
        torch.testing.assert_close(hidden[number], x[0], atol=1e-4, rtol=1e-4)


def test_new_adapters_change_nothing_and_trained_ones_add_beside_the_mlp(vit):
    images = random_images(2)
    adapters = Adapters.new(vit, 4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(run_blocks(vit, images, adapters=adapters), run_blocks(vit, images))
    hidden = torch.randn(1, 2, vit.dim)
    trained = dataclasses.replace(adapters, up=torch.randn_like(adapters.up))
    by_hand = 0.1 * (hidden @ trained.down[1]).clamp(min=0) @ trained.up[1]
    torch.testing.assert_close(trained.at(1, hidden), by_hand)


def test_the_meter_counts_plain_queries_whoever_computes_them(vit):
    images = random_images(5)
    with PassMeter(vit) as meter:
        vit.plain(images)
    assert meter.forward == pytest.approx(5) and meter.backward == 0
    prompt = torch.zeros(1, 2, 2, vit.dim, requires_grad=True)
    with PassMeter(vit) as meter:
        vit.query(vit.embed(images), Prompt((0,), (prompt,)))
    assert meter.forward == pytest.approx(5) and meter.backward == pytest.approx(5)
    with PassMeter(vit) as meter:
        run_blocks(vit, images)
    assert meter.forward == pytest.approx(5 * vit.tokens * vit.depth / (vit.tokens * (vit.depth - 1) + 1))
    vit.plain(images)
    assert meter.forward < 5 * 2  # nothing is counted outside


def test_the_loop_trains_what_it_is_given_at_its_rates_and_keeps_small_last_batches(vit):
    task, seen = ragged_tasks((3,), images=3)[0], []
    fast, slow, left_alone = (torch.zeros(2) for _ in range(3))

    def loss(images, labels):
        seen.append(len(labels))
        return (fast + slow).sum() + 0 * images.sum()

    recipe = Recipe("sgd", 0.5)
    assert fit(vit, task.training, QUICK.train, recipe, [fast], loss, slow=[slow]) == 4
    assert seen == [4, 4, 1]
    steps = 1 + 1.9 + 2.71  # momentum 0.9
    assert fast.tolist() == pytest.approx([-0.5 * steps] * 2)
    assert slow.tolist() == pytest.approx([-0.05 * steps] * 2)
    assert left_alone.tolist() == [0, 0] and not fast.requires_grad


def test_schedules_begin_at_the_rate_and_end_low():
    assert [schedule(0, 5) for schedule in (constant, cosine, quarter_cosine)] == [1, 1, 1]
    assert quarter_cosine(4, 5) == pytest.approx(0.0157, abs=1e-4)
    assert cosine(4, 5) == pytest.approx(0.0955, abs=1e-4)
    assert quarter_cosine(0, 1) == 1


def test_choice_is_by_cosine_for_each_image_and_pulls_only_keys():
    keys = torch.tensor([[2.0, 0.0], [0.0, 0.5], [-1.0, 0.0]], requires_grad=True)
    query = torch.tensor([[3.0, 1.0], [-1.0, 2.0]], requires_grad=True)
    choice = choose(query, keys, 2)
    assert choice.index.tolist() == [[0, 1], [1, 2]]
    torch.testing.assert_close(choice.cosines[0], torch.tensor([3.0, 1.0]) / 10**0.5)
    choice.cosines.sum().backward()
    assert query.grad is None and keys.grad is not None


def test_a_prompt_belongs_to_the_task_that_spent_most_of_its_choices_on_it():
    usage = torch.tensor([[90.0, 10.0, 0.0], [4.0, 3.0, 3.0]])  # shares: 0.9, 0.1, 0 and 0.4, 0.3, 0.3
    assert owner_of(usage).tolist() == [0, 1, 1]
    keys = torch.eye(3)
    choice = choose(torch.tensor([[1.0, 0.9, 0.8]]), keys, 3)
    assert match_by_owner(choice, usage, torch.zeros(1, 2)).argmax(dim=1).tolist() == [1]


def test_rows_are_split_into_keys_and_values():
    rows = torch.arange(8.0).reshape(4, 2)
    assert split_rows(rows).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_new_rows_are_unit_and_orthogonal_to_old_ones_until_there_is_no_room():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(3, 8)  # not orthogonal to each other, as after training
    new = orthogonal_rows(old, 4, generator)
    torch.testing.assert_close(new @ old.T, torch.zeros(4, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(new @ new.T, torch.eye(4), atol=1e-5, rtol=0)
    late = orthogonal_rows(torch.cat([old, new]), 3, generator)
    torch.testing.assert_close(late.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(late[0] @ torch.cat([old, new]).T, torch.zeros(7), atol=1e-5, rtol=0)


def test_heads_of_unequal_tasks_stand_side_by_side(vit):
    generator = torch.Generator().manual_seed(0)
    heads = [LinearHead.new(vit, classes, generator) for classes in (2, 3)]
    features = torch.randn(4, vit.dim)
    scores = score_all(heads, features)
    torch.testing.assert_close(scores[:, 2:], heads[1](features))
    kept = keep_task(scores, row_tasks([2, 3], vit.device), torch.tensor([0, 1, 0, 1]))
    assert kept.isinf().tolist() == [[False] * 2 + [True] * 3, [True] * 2 + [False] * 3] * 2


def test_a_class_covariance_is_shrunk_to_the_pooled_one_by_its_images():
    features, labels = torch.randn(12, 4), torch.tensor([0] * 10 + [1] * 2)
    means = torch.stack([features[labels == label].mean(dim=0) for label in (0, 1)])
    found = shrunk_covariances(features, labels, means)
    centred = features - means[labels]
    pooled = centred.T @ centred / 12
    own = centred[10:].T @ centred[10:] / 2
    torch.testing.assert_close(found[1], 2 / 3 * own + 1 / 3 * pooled)  # prior 4 / 4 = 1 image
    torch.testing.assert_close(TaskGaussians.fit(("a", "b"), features, labels, pooled=True).covariances[0], pooled)


def test_samples_have_the_moments_of_their_class_and_depend_on_class_and_version_alone():
    shape = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    both = TaskGaussians(("a", "b"), torch.tensor([[5.0, 0.0], [0.0, 5.0]]), shape[None])
    drawn = both.sample(20_000, version=1)
    torch.testing.assert_close(drawn.mean(dim=1), both.means, atol=0.05, rtol=0)
    torch.testing.assert_close(drawn[0].T.cov(), shape, atol=0.1, rtol=0)
    alone = TaskGaussians(("b",), both.means[1:], shape[None])
    assert torch.equal(alone.sample(4, version=1)[0], both.sample(4, version=1)[1])
    assert not torch.equal(alone.sample(4, version=2), alone.sample(4, version=1))


def test_replay_separates_classes_of_different_tasks():
    tasks = [
        TaskGaussians((name,), torch.tensor([mean]), 0.01 * torch.eye(2)[None])
        for name, mean in (("a", [1.0, 0.0]), ("b", [0.0, 1.0]))
    ]
    weight = torch.zeros(2, 2)
    replay(tasks, dataclasses.replace(QUICK, replay=32, replay_epochs=20), [weight], lambda x: x @ weight.T, 0.1)
    assert (torch.tensor([[1.0, 0.0], [0.0, 1.0]]) @ weight.T).argmax(dim=1).tolist() == [0, 1]
    assert not weight.requires_grad
    assert F.softmax(weight, dim=1)[0, 0] > 0.5
