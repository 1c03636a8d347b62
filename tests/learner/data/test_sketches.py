"""The demo's data: fifty classes in a fixed split, none of which the embedded backbone has seen."""

from importlib.resources import files

import numpy as np
from PIL import Image

from mqmk.learner.data import sketches


def test_there_are_ten_tasks_of_five_classes_each_with_its_sheet():
    assert len(sketches.TASKS) == 10
    assert len(set(sketches.CLASSES)) == 50
    folder = files("mqmk.learner.data") / "sketch_sheets"
    assert sorted(sheet.name for sheet in folder.iterdir()) == sorted(f"{name}.png" for name in sketches.CLASSES)


def test_the_split_is_fixed_and_nothing_is_on_both_sides():
    for name in ("owl", "The Eiffel Tower"):
        drawings = sketches.read(name)
        assert drawings.training.shape == (80, 28, 28)
        assert drawings.held_out.shape == (20, 28, 28)
        assert drawings.training.mean() > 128  # dark ink on white paper
        training = {drawing.tobytes() for drawing in drawings.training}
        assert not training & {drawing.tobytes() for drawing in drawings.held_out}


def test_a_sheet_reads_as_it_was_written():
    drawings = sketches.read("owl")
    sheet = sketches.as_sheet(np.concatenate([drawings.training, drawings.held_out]))
    with (files("mqmk.learner.data") / "sketch_sheets" / "owl.png").open("rb") as file:
        assert np.array_equal(np.asarray(sheet), np.asarray(Image.open(file)))


def test_the_embedded_backbone_never_saw_the_demo_classes():
    card = (files("mqmk.matcher") / "embedded" / "CARD.md").read_text()
    trained_on = card.split("Classes it was trained on: ")[1].split(".\n")[0].split(", ")
    assert len(trained_on) == 295
    assert not set(trained_on) & set(sketches.CLASSES)
