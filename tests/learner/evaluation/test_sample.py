"""The sample of held-out images: bounded, drawn from every class, decided by content alone."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from mqmk.learner.evaluation.query_table import HeldOut
from mqmk.learner.evaluation.sample import Sample, TaskImages, choose_sample, image_ids

CLASSES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=6)
"""Of each task, the number of images of each class."""


def random_images_of(classes: list[list[int]], seed: int = 0) -> list[TaskImages]:
    random = np.random.default_rng(seed)
    tasks = []
    for sizes in classes:
        labels = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
        ids = random.integers(0, 256, (len(labels), 16), dtype=np.uint8)
        tasks.append(TaskImages.of(torch.from_numpy(ids), torch.from_numpy(labels)))
    return tasks


def counts_of(sample: Sample) -> dict[tuple[int, int], int]:
    pairs = list(zip(sample.task.tolist(), sample.label.tolist(), strict=True))
    return {pair: pairs.count(pair) for pair in pairs}


@given(CLASSES, st.integers(1, 60))
def test_a_sample_is_as_large_as_allowed_and_as_even_as_the_classes_are(classes: list[list[int]], most: int) -> None:
    tasks = random_images_of(classes)
    sample = choose_sample(tasks, most)
    assert len(sample) == len(sample.task) == min(most, sum(map(sum, classes)))
    counts, largest = counts_of(sample), max(counts_of(sample).values(), default=0)
    for task, sizes in enumerate(classes):
        for label, size in enumerate(sizes):
            assert counts.get((task, label), 0) >= min(size, largest - 1)
    for task, label, place, name in zip(sample.task.tolist(), sample.label.tolist(), sample.place.tolist(),
                                        sample.ids, strict=True):  # fmt: skip
        assert bytes(tasks[task].ids[place]).ljust(16, b"\0").hex() == name and tasks[task].labels[place] == label


def test_the_lowest_ids_win_within_a_class_and_among_classes() -> None:
    ids = torch.tensor([[9], [1], [5], [3], [2], [7]], dtype=torch.uint8).repeat(1, 16)
    tasks = [TaskImages.of(ids[:3], torch.tensor([0, 0, 1])), TaskImages.of(ids[3:], torch.tensor([0, 1, 1]))]
    first_byte = [int(name[:2]) for name in choose_sample(tasks, 3).ids]
    assert first_byte == [1, 2, 3], "the first image of four classes; that with the highest id is left out"
    assert [int(name[:2]) for name in choose_sample(tasks, 5).ids] == [1, 2, 3, 5, 7]
    assert [int(name[:2]) for name in choose_sample(tasks).ids] == [1, 2, 3, 5, 7, 9]


def test_one_more_task_replaces_only_as_many_images_as_it_brings() -> None:
    tasks = random_images_of([[8] * 5] * 40)
    before, after = choose_sample(tasks[:39], 300), choose_sample(tasks, 300)
    new = int((after.task == 39).sum())
    assert 5 <= new <= 10
    assert len({*before.ids} - {*after.ids}) == new


def test_the_order_of_images_within_a_file_does_not_matter() -> None:
    (task,) = random_images_of([[5, 3]])
    turned = TaskImages(task.ids[::-1].copy(), task.labels[::-1].copy())
    assert choose_sample([task], 4).ids == choose_sample([turned], 4).ids


def test_an_image_has_the_id_by_which_queries_are_recorded() -> None:
    pixels = torch.randint(0, 256, (3, 3, 4, 4), dtype=torch.uint8)
    labels = torch.zeros(3, dtype=torch.int64)
    found = choose_sample([TaskImages.of(image_ids(pixels), labels)])
    assert {*found.ids} == {*HeldOut(pixels, labels, labels).ids}
    assert image_ids(pixels[:0]).shape == (0, 16)
