"""Every registered benchmark method keeps the protocol: one task at a time, any tasks, one image at a time."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from support.method_tasks import QUICK, ragged_tasks

from mqmk.learner.bench.compare import without_test_images
from mqmk.learner.bench.methods.registry import choose_methods, list_methods
from mqmk.learner.errors import LearnerError
from mqmk.matcher.images import normalise

NAMES = [*list_methods()]
HONEST = [name for name, info in list_methods().items() if not info.is_leaky]
PAPER = (
    "l2p l2p++ deep-l2p++ dualprompt coda-p esn evoprompt cprompt hide-prompt sqsk mqmk mqmk-ei joint ncm ranpac "
    "ranpac-fsa fecam probe-replay ease-prefix mos-refine"
)


class OnlyWhileLearned:
    """Images that may be read only while their own task is learned."""

    def __init__(self, images):
        self.images, self.may_be_read = images, False

    def __len__(self):
        return len(self.images)

    @property
    def class_counts(self):
        return self.images.class_counts

    def batches(self, size, seed, balanced=False):
        assert self.may_be_read, "read while another task is learned"
        return self.images.batches(size, seed, balanced)


@pytest.fixture(scope="module")
def learned(vit):
    """A method after three tasks of 3, 1 and 2 classes; what was kept after each; each learned once for all tests."""
    known = {}

    def learn(name):
        if name not in known:
            torch.manual_seed(0)
            method, kept = list_methods()[name].create(vit, QUICK), []
            tasks = [dataclasses.replace(task, training=OnlyWhileLearned(task.training)) for task in ragged_tasks()]
            for task in tasks:
                task.training.may_be_read = True
                method.learn(without_test_images(task, vit))
                task.training.may_be_read = False
                kept.append({key: value.detach().clone() for key, value in method.kept().items()})
            known[name] = method, kept
        return known[name]

    return learn


@pytest.fixture(scope="module")
def images(vit):
    return torch.cat([normalise(task.held_out.pixels, vit.info) for task in ragged_tasks()])


def test_the_methods_of_the_paper_and_its_neighbours_are_there():
    assert set(PAPER.split()) <= set(NAMES)


def test_methods_with_the_batch_bug_run_only_where_they_were_asked_for():
    assert [info.name for info in choose_methods("all")] == HONEST
    assert [info.name for info in choose_methods("ncm", leaky=True)] == ["ncm", "mqmk-leaky", "dualprompt-leaky"]
    with pytest.raises(LearnerError, match="add --leaky"):
        choose_methods("mqmk-leaky")
    with pytest.raises(LearnerError, match="no method is called nmc; choose among"):
        choose_methods("ncm,nmc")


@pytest.mark.parametrize("name", HONEST)
def test_the_answer_for_an_image_does_not_depend_on_its_batch(name, learned, images):
    method, _ = learned(name)
    together = method.predict(images)
    alone = [method.predict(image[None]) for image in images]
    torch.testing.assert_close(torch.cat([each.scores for each in alone]), together.scores, atol=1e-5, rtol=1e-5)
    backwards = method.predict(images.flip(0))
    torch.testing.assert_close(backwards.scores.flip(0), together.scores, atol=1e-5, rtol=1e-5)
    if together.matched_task is not None:
        assert torch.cat([each.matched_task for each in alone]).tolist() == together.matched_task.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_unequal_tasks_are_learned_without_data_of_others_and_only_seen_classes_compete(name, learned, images):
    method, kept = learned(name)  # reading another task's images would have failed
    answer = method.predict(images)
    assert answer.scores.shape == (len(images), 3 + 1 + 2)
    assert not answer.scores.isnan().any()
    assert answer.scores.amax(dim=1).isfinite().all()
    if answer.matched_task is not None:
        assert answer.matched_task.min() >= 0 and answer.matched_task.max() < 3
    assert all(value.isfinite().all() for value in kept[-1].values())


@pytest.mark.parametrize("name", NAMES)
def test_what_a_task_left_never_changes_later(name, learned):
    _, kept = learned(name)
    for earlier, later in pairwise(kept):
        owned = [key for key in earlier if key.startswith("task")]
        assert owned
        for key in owned:
            assert torch.equal(earlier[key], later[key]), key


@pytest.mark.parametrize("name", HONEST)
def test_the_same_seed_gives_the_same_answers(name, vit, learned, images):
    method, _ = learned(name)
    again = list_methods()[name].create(vit, QUICK)
    for task in ragged_tasks():
        again.learn(task)
    torch.testing.assert_close(again.predict(images).scores, method.predict(images).scores, atol=0, rtol=0)


PRINTED = {  # in the paper's tables: CIFAR-100, ImageNet-R of 5, 10, 20 tasks, DomainNet; matching rates of all three
    "mqmk": (91.73, 79.61, 78.36, 76.10, 85.62, 82.28, 77.97, 82.24),
    "mqmk-ei": (92.00, 78.50, 78.00, 75.82, 84.54, 86.17, 75.40, 76.67),
    "cprompt": (87.82, 78.42, 77.14, 74.79, 82.97, 69.37, 64.00, 75.36),
    "esn": (86.42, 73.42, 75.11, 70.57, 79.22, 78.50, 70.33, 72.84),
    "coda-p": (86.25, 76.51, 75.45, 72.37, 80.04, None, None, None),
    "evoprompt": (87.97, 77.16, 76.83, 74.41, None, None, None, None),
    "l2p++": (82.50, 70.83, 69.29, 65.89, None, None, None, None),
    "deep-l2p++": (84.30, 73.93, 71.66, 68.42, None, None, None, None),
    "sqsk": (None, None, 70.61, None, None, 49.14, 45.15, 70.55),
    "joint": (91.79, None, 79.27, None, 89.15, None, None, None),
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_rows_of_the_papers_tables_stand_beside_ours(name):
    known = list_methods()[name].published
    accuracy = (known.cifar100, known.imagenet_r_5, known.imagenet_r, known.imagenet_r_20, known.domainnet)
    matching = (known.matching_cifar100, known.matching_imagenet_r, known.matching_domainnet)
    assert accuracy + matching == PRINTED[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_method_says_what_it_is(name):
    info = list_methods()[name]
    assert info.description
    assert info.published is None or info.published.source
