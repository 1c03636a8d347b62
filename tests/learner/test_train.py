"""Learning one task: it learns, it repeats itself exactly, it survives a kill, and it leaves other tasks alone."""

import dataclasses

import pytest
import torch
from demo_tasks import demo_task, side
from PIL import Image
from torch.nn import functional as F

from mqmk.learner.augment import augment
from mqmk.learner.settings import Augmentation, TrainSettings
from mqmk.learner.tasks import InMemory, Streamed, Task, pictures
from mqmk.learner.train import Learning, empty_pool, train_task
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.images import normalise

QUICK = TrainSettings(epochs=2, batch=32, e_length=4)


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


def test_a_task_is_learned_and_its_held_out_pictures_are_recognised(vit):
    seen = []
    train_task(demo_task("birds"), vit, empty_pool(vit, QUICK), TrainSettings(epochs=3), report=seen.append)
    assert [progress.epoch for progress in seen] == [1, 2, 3]
    assert seen[-1].loss < seen[0].loss
    assert seen[-1].held_out_accuracy > 0.6  # five classes: chance is 0.2
    assert seen[0].images_per_second > 0
    assert seen[-1].seconds_left == 0


def test_the_held_out_side_is_looked_at_only_where_something_depends_on_it(vit, birds):
    seen = []
    train_task(birds, vit, empty_pool(vit, QUICK), QUICK, report=seen.append)
    assert [progress.held_out_accuracy is None for progress in seen] == [True, False]
    seen.clear()
    train_task(birds, vit, empty_pool(vit, QUICK), dataclasses.replace(QUICK, patience=5), report=seen.append)
    assert [progress.held_out_accuracy is None for progress in seen] == [False, False]


def test_a_step_may_look_at_half_the_patches_and_keys_still_see_all(vit, birds):
    settings = dataclasses.replace(QUICK, epochs=4, patches=0.5)
    seen, tokens = [], []
    run_query = vit.query
    vit.query = lambda stem, *prompts: (tokens.append(stem.hidden.shape[1]), run_query(stem, *prompts))[1]
    try:
        trained = train_task(birds, vit, empty_pool(vit, settings), settings, report=seen.append)
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


class KilledError(Exception):
    pass


@pytest.mark.parametrize(
    "settings",
    [QUICK, dataclasses.replace(QUICK, keys="learned", patience=3)],
    ids=["plain", "learned-keys-early-stop"],
)
def test_a_killed_run_goes_on_and_ends_with_the_same_tensors(vit, birds, settings):
    settings = dataclasses.replace(settings, epochs=4)
    pool = empty_pool(vit, settings)
    whole = tensors(train_task(birds, vit, pool, settings))
    epochs, states = [], []

    def kill_after_two(progress):
        epochs.append(progress.epoch)
        if progress.epoch == 2:
            raise KilledError

    with pytest.raises(KilledError):
        train_task(birds, vit, pool, settings, keep=states.append, report=kill_after_two)
    resumed = train_task(birds, vit, pool, settings, resume=states[-1], report=lambda p: epochs.append(p.epoch))
    assert epochs == [1, 2, 3, 4]
    assert_same(whole, tensors(resumed))


def test_a_damaged_checkpoint_means_beginning_anew(vit, birds):
    epochs = []
    pool = empty_pool(vit, QUICK)
    train_task(birds, vit, pool, QUICK, resume=b"half a file", report=lambda p: epochs.append(p.epoch))
    assert epochs == [1, 2]


def test_a_later_task_leaves_the_g_prompt_and_earlier_tasks_untouched(vit, birds):
    first = train_task(birds, vit, empty_pool(vit, QUICK), QUICK)
    pool = first.added_to(empty_pool(vit, QUICK))
    before = {name: tensor.clone() for name, tensor in tensors(first).items()}
    second = train_task(demo_task("fruit", 16), vit, pool, QUICK)
    assert_same(before, tensors(first))
    assert torch.equal(second.g_prompt, first.g_prompt)
    assert second.added_to(pool).tasks[0] is first.prompt
    assert not torch.equal(second.prompt.e_prompt, first.prompt.e_prompt)


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
        return Learning(demo_task("fruit", 16), vit, pool, dataclasses.replace(QUICK, start=how)).e_prompt.detach()

    assert torch.equal(start("first"), pool.tasks[0].e_prompt)
    assert torch.equal(start("previous"), pool.tasks[1].e_prompt)
    assert start("random").abs().max() <= QUICK.spread


def test_the_g_prompt_may_be_trained_on_every_task(vit, birds):
    always = dataclasses.replace(QUICK, g_prompt="always")
    pool = train_task(birds, vit, empty_pool(vit, always), always).added_to(empty_pool(vit, always))
    assert not torch.equal(train_task(demo_task("fruit", 16), vit, pool, always).g_prompt, pool.g_prompt)


def test_a_step_is_one_forward_pass_and_no_gradient_goes_below_the_first_trained_layer(vit, birds):
    pool = train_task(birds, vit, empty_pool(vit, QUICK), QUICK).added_to(empty_pool(vit, QUICK))
    learning = Learning(demo_task("fruit", 16), vit, pool, dataclasses.replace(QUICK, keys="learned"))
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
        learning.loss(torch.randn(2, 3, 28, 28), torch.tensor([0, 1])).backward()
    finally:
        vit.stem, vit.query = run_stem, run_query
    assert calls == [("stem", False), ("query", True)]
    assert learning.g_prompt.grad is None
    assert learning.keys.grad is not None


def test_the_matching_loss_moves_the_keys_and_never_the_queries(vit, birds):
    learning = Learning(birds, vit, empty_pool(vit, QUICK), dataclasses.replace(QUICK, keys="learned"))
    images, labels = normalise(birds.training.pixels[:8], vit.info), birds.training.labels[:8]
    learning.loss(images, labels).backward()
    with_keys = learning.e_prompt.grad.clone()
    plain = Learning(birds, vit, empty_pool(vit, QUICK), QUICK)
    plain.loss(images, labels).backward()
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


def test_early_stopping_keeps_the_best_epoch(vit, birds):
    settings = dataclasses.replace(QUICK, epochs=30, patience=1, learning_rate=0.5)
    seen = []
    trained = train_task(birds, vit, empty_pool(vit, settings), settings, report=seen.append)
    assert len(seen) < 30
    best = max(progress.held_out_accuracy for progress in seen)
    pool = trained.added_to(empty_pool(vit, settings))
    stem = vit.stem(vit.embed(normalise(birds.held_out.pixels, vit.info)), pool.g, pool.e_layers[0])
    answers = (F.normalize(vit.query(stem, pool.g, pool.e(0)), dim=1) @ pool.head.T).argmax(dim=1)
    assert (answers == birds.held_out.labels).float().mean().item() == pytest.approx(best)


def test_accumulated_gradients_equal_those_of_the_whole_batch(vit, birds):
    settings = dataclasses.replace(QUICK, epochs=1, augmentation=Augmentation(least_area=1.0, mirror=False))
    pool = empty_pool(vit, settings)
    whole = train_task(birds, vit, pool, settings)
    parts = train_task(birds, vit, pool, dataclasses.replace(settings, accumulate=4))
    torch.testing.assert_close(parts.prompt.head, whole.prompt.head, atol=1e-4, rtol=1e-3)


def test_keys_per_task_and_means_are_as_asked(vit, birds):
    settings = dataclasses.replace(QUICK, epochs=1, keys_per_task=2, plain_means=False)
    prompt = train_task(birds, vit, empty_pool(vit, settings), settings).prompt
    assert prompt.keys.shape == (2, 128)
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


def test_pictures_that_fit_are_kept_in_memory_and_others_are_streamed(vit, monkeypatch):
    def read(_seed):
        return ((Image.new("RGB", (40, 30), (i, 0, 0)), i % 2) for i in range(10))

    kept = pictures((5, 5), read, vit.info)
    assert isinstance(kept, InMemory)
    monkeypatch.setattr("mqmk.learner.tasks.MEMORY_FOR_PICTURES", 1000)
    streamed = pictures((5, 5), read, vit.info)
    assert isinstance(streamed, Streamed)
    pixels = torch.cat([batch.pixels for batch in streamed.batches(3, seed=None)])
    assert torch.equal(pixels, kept.pixels)
    assert len(streamed) == len(kept) == 10


def test_augmentation_varies_pictures_and_can_be_turned_off():
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
