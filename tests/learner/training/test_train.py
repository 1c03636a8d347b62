"""Learning one task: it learns, it repeats itself exactly, and it leaves other tasks alone."""

import dataclasses

import pytest
import torch
from PIL import Image
from support.daemons.demo_tasks import demo_task, side
from torch.nn import functional as F

from mqmk.learner.data.tasks import InMemory, Streamed, Task, load_images
from mqmk.learner.settings import Augmentation, TrainSettings
from mqmk.learner.training import checkpoint
from mqmk.learner.training.augment import augment
from mqmk.learner.training.train import compute_query, cosine_lr, empty_pool, scheduled_lr, task_loss, train_task
from mqmk.learner.training.train_state import TrainState
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.classifiers import logits as logits_of
from mqmk.matcher.images import normalise
from mqmk.matcher.matchers import match_images
from mqmk.matcher.pool import read_head

QUICK = TrainSettings(epochs=2, batch=32, e_length=4, anchor_steps=0)


@pytest.fixture(scope="module")
def vit():
    return load_backbone(device=torch.device("cpu"))


@pytest.fixture(scope="module")
def birds() -> Task:
    return demo_task("birds", per_class=16)


def tensors(trained):
    return trained.prompt.tensors() | {"g_prompt": trained.g_prompt}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def assert_different(first, second):
    assert any(not torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_task_is_learned_and_its_held_out_images_are_recognised(vit):
    seen = []
    train_task(
        demo_task("birds"),
        vit,
        empty_pool(vit, QUICK),
        TrainSettings(epochs=3, batch=64, anchor_steps=0),
        on_epoch=seen.append,
    )
    assert [progress.epoch for progress in seen] == [1, 2, 3]
    assert seen[-1].loss < seen[0].loss
    assert seen[-1].held_out_accuracy > 0.6  # five classes: chance is 0.2
    assert seen[0].images_per_second > 0
    assert seen[-1].seconds_left == 0


@pytest.mark.parametrize("patience", [None, 5])
def test_the_held_out_side_is_looked_at_only_at_the_end(vit, birds, patience):
    settings, seen = dataclasses.replace(QUICK, patience=patience), []
    train_task(birds, vit, empty_pool(vit, settings), settings, on_epoch=seen.append)
    assert [progress.held_out_accuracy is None for progress in seen] == [True, False]


def test_a_step_may_look_at_half_the_patches_and_keys_still_see_all(vit, birds):
    settings = dataclasses.replace(QUICK, epochs=4, patches=0.5)
    seen, tokens = [], []
    run_query = vit.query
    vit.query = lambda stem, *prompts: (tokens.append(stem.hidden.shape[1]), run_query(stem, *prompts))[1]
    try:
        trained = train_task(birds, vit, empty_pool(vit, settings), settings, on_epoch=seen.append)
    finally:
        vit.query = run_query
    assert set(tokens) == {1 + 16, 1 + 8}
    assert tokens[-1] == 1 + 16
    assert seen[-1].loss < seen[0].loss
    assert_same(tensors(trained), tensors(train_task(birds, vit, empty_pool(vit, settings), settings)))


def test_e_prompts_go_where_the_settings_say(vit):
    assert empty_pool(vit, QUICK).e_layers == (2, 3, 4)
    assert empty_pool(vit, dataclasses.replace(QUICK, e_layers=(1, 3))).e_layers == (1, 3)


def test_the_same_seed_gives_the_same_tensors_and_another_seed_others(vit, birds):
    pool = empty_pool(vit, QUICK)
    first = tensors(train_task(birds, vit, pool, QUICK))
    assert_same(first, tensors(train_task(birds, vit, pool, QUICK)))
    assert_different(first, tensors(train_task(birds, vit, pool, dataclasses.replace(QUICK, seed=1))))


def test_a_later_task_leaves_the_g_prompt_and_earlier_tasks_untouched(vit, birds):
    first = train_task(birds, vit, empty_pool(vit, QUICK), QUICK)
    pool = first.added_to(empty_pool(vit, QUICK))
    before = {name: tensor.clone() for name, tensor in tensors(first).items()}
    second = train_task(demo_task("fruit", 16), vit, pool, QUICK)
    assert_same(before, tensors(first))
    assert torch.equal(second.g_prompt, first.g_prompt)
    assert second.added_to(pool).tasks[0] is first.prompt
    assert not torch.equal(second.prompt.e_prompt, first.prompt.e_prompt)


def loss_of(vit, state, images, labels):
    """One step's loss, with keys where they are trained."""
    learned = any(tensor is state.keys for tensor in state.trained_tensors())
    keys = state.keys[state.key_of_class[labels]] if learned else None
    return task_loss(compute_query(vit, state, vit.embed(images)), labels, state.head_rows, 16.0, keys)


def test_the_learning_rate_falls_along_half_a_cosine():
    assert [cosine_lr(0.06, progress) for progress in (0.0, 0.5, 1.0, 1.5)] == pytest.approx([0.06, 0.03, 0.0, 0.0])


def test_tasks_do_not_depend_on_the_order_they_come_in(vit, birds):
    pool = train_task(birds, vit, empty_pool(vit, QUICK), QUICK).added_to(empty_pool(vit, QUICK))
    at_once = train_task(demo_task("fruit", 16), vit, pool, QUICK)
    between = train_task(demo_task("sea", 16), vit, pool, QUICK).added_to(pool)
    assert_same(tensors(at_once), tensors(train_task(demo_task("fruit", 16), vit, between, QUICK)))
    previous = dataclasses.replace(QUICK, start="previous")
    assert_different(tensors(at_once), tensors(train_task(demo_task("fruit", 16), vit, between, previous)))


def test_a_new_e_prompt_starts_where_the_settings_say(vit, birds):
    pool = train_task(birds, vit, empty_pool(vit, QUICK), QUICK).added_to(empty_pool(vit, QUICK))
    pool = train_task(demo_task("sea", 16), vit, pool, QUICK).added_to(pool)

    def start(how):
        return TrainState(demo_task("fruit", 16), vit, pool, dataclasses.replace(QUICK, start=how)).e_prompt.detach()

    assert torch.equal(start("first"), pool.tasks[0].e_prompt)
    assert torch.equal(start("previous"), pool.tasks[1].e_prompt)
    assert start("random").abs().max() <= QUICK.spread


def test_the_g_prompt_may_be_trained_on_every_task(vit, birds):
    always = dataclasses.replace(QUICK, g_prompt="always")
    pool = train_task(birds, vit, empty_pool(vit, always), always).added_to(empty_pool(vit, always))
    assert not torch.equal(train_task(demo_task("fruit", 16), vit, pool, always).g_prompt, pool.g_prompt)


def test_a_step_is_one_forward_pass_and_no_gradient_goes_below_the_first_trained_layer(vit, birds):
    pool = train_task(birds, vit, empty_pool(vit, QUICK), QUICK).added_to(empty_pool(vit, QUICK))
    state = TrainState(demo_task("fruit", 16), vit, pool, dataclasses.replace(QUICK, keys="learned"))
    calls = []
    run_stem, run_query = vit.stem, vit.query

    def watched_stem(*arguments):
        stem = run_stem(*arguments)
        calls.append(("stem", stem.hidden.requires_grad))
        return stem

    def watched_query(*arguments):
        calls.append(("query", torch.is_grad_enabled()))
        return run_query(*arguments)

    vit.stem, vit.query = watched_stem, watched_query
    try:
        loss_of(vit, state, torch.randn(2, 3, 28, 28), torch.tensor([0, 1])).backward()
    finally:
        vit.stem, vit.query = run_stem, run_query
    assert calls == [("stem", False), ("query", True)]
    assert state.g_prompt.grad is None
    assert state.keys.grad is not None


def test_the_matching_loss_moves_the_keys_and_never_the_queries(vit, birds):
    learning = TrainState(birds, vit, empty_pool(vit, QUICK), dataclasses.replace(QUICK, keys="learned"))
    images, labels = normalise(birds.training.pixels[:8], vit.info), birds.training.labels[:8]
    loss_of(vit, learning, images, labels).backward()
    with_keys = learning.e_prompt.grad.clone()
    plain = TrainState(birds, vit, empty_pool(vit, QUICK), QUICK)
    loss_of(vit, plain, images, labels).backward()
    torch.testing.assert_close(with_keys, plain.e_prompt.grad)


def test_closed_form_keys_minimise_the_matching_loss(vit, birds):
    trained = train_task(birds, vit, empty_pool(vit, QUICK), QUICK)
    pool = trained.added_to(empty_pool(vit, QUICK))
    stem = vit.stem(vit.embed(normalise(birds.training.pixels, vit.info)), pool.g, pool.e_layers[0])
    queries = vit.query(stem, pool.g, pool.e(0))

    def loss(keys):
        return (1 - F.cosine_similarity(queries, keys[birds.training.labels])).sum()

    keys = trained.prompt.keys
    for label in range(5):
        own = F.normalize(queries[birds.training.labels == label], dim=1)
        torch.testing.assert_close(keys[label], own.mean(dim=0), atol=1e-5, rtol=1e-4)
    for _ in range(20):
        assert loss(keys + 0.05 * torch.randn_like(keys)) > loss(keys)


def test_accumulated_gradients_equal_those_of_the_whole_batch(vit, birds):
    settings = dataclasses.replace(QUICK, epochs=1, augmentation=Augmentation(least_area=1.0, mirror=False))
    pool = empty_pool(vit, settings)
    whole = train_task(birds, vit, pool, settings)
    parts = train_task(birds, vit, pool, dataclasses.replace(settings, accumulate=4))
    torch.testing.assert_close(parts.prompt.head, whole.prompt.head, atol=1e-4, rtol=1e-3)


def test_a_constant_schedule_keeps_the_learning_rate():
    constant = dataclasses.replace(QUICK, learning_rate=0.06, schedule="constant")
    assert [scheduled_lr(constant, progress) for progress in (0.0, 0.5, 1.0)] == [0.06, 0.06, 0.06]
    cosine = dataclasses.replace(constant, schedule="cosine")
    assert [scheduled_lr(cosine, progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([0.06, 0.03, 0.0])


def test_a_free_head_reads_normalised_features_with_rows_of_any_length_and_no_scale(vit, birds):
    settings = dataclasses.replace(QUICK, head="free", head_scale=99.0)
    pool = empty_pool(vit, settings)
    assert (pool.logit_scale, pool.head_kind) == (1.0, "free")
    state = TrainState(birds, vit, pool, settings)
    assert state.head.std().item() == pytest.approx(0.02, rel=0.2)  # as published
    query, labels, rows = torch.tensor([[3.0, 4.0]]), torch.tensor([1]), torch.tensor([[1.0, 2.0], [5.0, 0.0]])
    logits = torch.tensor([[0.6 * 1 + 0.8 * 2, 0.6 * 5]])
    found = task_loss(query, labels, read_head(rows, "free"), pool.logit_scale)
    torch.testing.assert_close(found, F.cross_entropy(logits, labels))
    trained = train_task(birds, vit, pool, settings).added_to(pool)
    assert trained.tasks[0].head.norm(dim=1).std() > 0
    images = normalise(birds.training.pixels[:6], vit.info)
    match = match_images("mqmk", vit, trained, images)
    expected = F.normalize(match.query, dim=1) @ trained.tasks[0].head.T
    torch.testing.assert_close(logits_of(trained, match, "fc", "all"), expected)


@pytest.fixture
def uneven(birds) -> Task:
    """The same with fewer images of the first class."""
    rows = torch.arange(12, len(birds.training))
    return dataclasses.replace(birds, training=InMemory(birds.training.pixels[rows], birds.training.labels[rows]))


def test_classes_that_share_a_key_weigh_by_their_images(vit, uneven):
    settings = dataclasses.replace(QUICK, epochs=1, keys_per_task=2)
    trained = train_task(uneven, vit, empty_pool(vit, settings), settings)
    pool = trained.added_to(empty_pool(vit, settings))
    stem = vit.stem(vit.embed(normalise(uneven.training.pixels, vit.info)), pool.g, pool.e_layers[0])
    queries = F.normalize(vit.query(stem, pool.g, pool.e(0)), dim=1)
    for key, group in enumerate([[0, 1, 2], [3, 4]]):
        mine = torch.isin(uneven.training.labels, torch.tensor(group))
        expected = F.normalize(queries[mine].sum(dim=0), dim=0)
        torch.testing.assert_close(F.normalize(trained.prompt.keys[key], dim=0), expected, atol=1e-5, rtol=1e-4)
    assert trained.prompt.class_samples == (4, 16, 16, 16, 16)
    assert trained.prompt.samples == 68


def test_a_shared_key_is_learned_from_every_class_of_its_group(vit, birds):
    settings = dataclasses.replace(QUICK, epochs=1, keys="learned", keys_per_task=2)
    state = TrainState(birds, vit, empty_pool(vit, settings), settings)
    images = normalise(birds.training.pixels[:3], vit.info)
    before = state.keys.detach().clone()
    query = compute_query(vit, state, vit.embed(images)).detach()
    state.keys.grad = None
    loss_of(vit, state, images, torch.tensor([0, 1, 2])).backward()
    moved = state.keys.grad
    assert moved.shape == (2, 128)
    assert not moved[1].any()
    expected = before[:1].requires_grad_()
    (1 - F.cosine_similarity(query, expected)).mean().backward()
    torch.testing.assert_close(moved[:1], expected.grad)
    states = []
    trained = train_task(birds, vit, empty_pool(vit, settings), settings, on_checkpoint=states.append)
    assert torch.equal(trained.prompt.keys, checkpoint.from_bytes(states[-1])["now.keys"])  # as learned, not added up


def test_means_and_identity_are_as_asked(vit, birds):
    settings = dataclasses.replace(QUICK, epochs=1, plain_means=False)
    prompt = train_task(birds, vit, empty_pool(vit, settings), settings).prompt
    assert prompt.keys.shape == (5, 128)
    assert prompt.plain_means is None
    assert prompt.samples == len(birds.training)
    assert prompt.manifest_sha256 == "ab" * 32


@pytest.mark.parametrize("streamed", [False, True])
def test_balanced_batches_show_rare_classes_as_often_as_common_ones(vit, streamed):
    labels = torch.tensor([0] * 300 + [1] * 30)
    source = InMemory(torch.zeros(330, 3, 28, 28, dtype=torch.uint8), labels)
    if streamed:
        read = [(Image.new("RGB", (28, 28)), int(label)) for label in labels]
        source = Streamed((300, 30), lambda _: read, vit.info)
    seen = torch.cat([batch.labels for batch in source.batches(32, seed=1, balanced=True)])
    assert 0.4 < seen.float().mean().item() < 0.6
    assert 250 < len(seen) < 420
    plainly = torch.cat([batch.labels for batch in source.batches(32, seed=1)])
    assert sorted(plainly.tolist()) == sorted(labels.tolist())


def test_images_that_fit_are_kept_in_memory_and_others_are_streamed(vit, monkeypatch):
    def read(_seed):
        return ((Image.new("RGB", (40, 30), (i, 0, 0)), i % 2) for i in range(10))

    kept = load_images((5, 5), read, vit.info)
    assert isinstance(kept, InMemory)
    monkeypatch.setattr("mqmk.learner.data.tasks.MEMORY_FOR_IMAGES", 1000)
    streamed = load_images((5, 5), read, vit.info)
    assert isinstance(streamed, Streamed)
    pixels = torch.cat([batch.pixels for batch in streamed.batches(3, seed=None)])
    assert torch.equal(pixels, kept.pixels)
    assert len(streamed) == len(kept) == 10


def test_augmentation_varies_images_and_can_be_turned_off():
    images = side("birds", "training", 2).pixels.float()
    random = torch.Generator().manual_seed(0)
    assert augment(images, Augmentation(least_area=1.0, mirror=False), random) is images
    varied = augment(images, Augmentation(), random)
    assert varied.shape == images.shape
    assert not torch.equal(varied, images)
    mirrored = augment(images, Augmentation(least_area=1.0), torch.Generator().manual_seed(0))
    for one, before in zip(mirrored, images, strict=True):
        straight, flipped = (one - before).abs().mean(), (one - before.flip(2)).abs().mean()
        assert min(straight, flipped) < 1e-3
