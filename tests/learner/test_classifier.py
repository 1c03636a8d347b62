"""One value that learns from class folders, predicts, and survives being saved and loaded."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import huggingface_hub
import pytest
from PIL import Image
from support.shell import save_sketches

from mqmk.learner.classifier import Classifier, load
from mqmk.learner.errors import LearnerError, SettingsError
from mqmk.learner.settings import TrainSettings
from mqmk.matcher.backbone import RANDOM, load_backbone
from mqmk.matcher.errors import BackboneError, ImageError, MatchError, PoolError
from mqmk.matcher.pool_files import write_pool
from mqmk.matcher.pool_store import PoolStore
from mqmk.matcher.predictor import PredictSettings
from mqmk.matcher.prompted_vit import FrozenViT

QUICK = TrainSettings(epochs=3)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for task, labels in {"birds": ("owl", "parrot"), "sea": ("crab", "whale")}.items():
        for label in labels:
            save_sketches(folder / task, label, 0, 40)
            save_sketches(folder / "aside", label, 40, 50)
    return folder


@pytest.fixture(scope="module")
def vit() -> FrozenViT:
    return load_backbone("embedded")


@pytest.fixture(scope="module")
def birds(vit: FrozenViT, photos: Path) -> Classifier:
    return Classifier(vit).learn("birds", photos / "birds", QUICK)


@pytest.fixture(scope="module")
def both(birds: Classifier, photos: Path) -> Classifier:
    return birds.learn("sea", str(photos / "sea"), QUICK)


def test_two_tasks_are_learned_and_separated(both, photos):
    asked = sorted((photos / "aside").glob("*/*.png"))
    answers = both.predict(asked)
    right = [answer.label == path.parent.name for answer, path in zip(answers, asked, strict=True)]
    assert sum(right) >= 0.8 * len(right) == 32
    assert {answer.task for answer in answers} == {"birds", "sea"}


def test_learning_leaves_the_classifier_as_it_was(birds, both, photos):
    assert birds.tasks == ("birds",) and both.tasks == ("birds", "sea")
    assert {answer.label for answer in birds.predict([photos / "aside" / "crab" / "40.png"])[0].top} == {
        "owl",
        "parrot",
    }
    with pytest.raises(FrozenInstanceError):
        birds.pool = both.pool


def test_a_path_its_bytes_and_its_image_get_the_same_answer(both, photos):
    path = photos / "aside" / "owl" / "40.png"
    forms = [path, str(path), path.read_bytes(), Image.open(path), Image.open(path).convert("RGBA")]
    assert len({(answer.label, answer.probability) for answer in both.predict(forms)}) == 1


def test_more_images_than_a_batch_are_answered_in_order(both, photos):
    owl, crab = (photos / "aside" / label / "40.png" for label in ("owl", "crab"))
    answers = both.predict(path for path in (*[owl] * 65, crab))
    assert [answer.label for answer in answers] == ["owl"] * 65 + ["crab"]
    assert both.predict([]) == []


def test_settings_and_the_number_of_answers_are_passed_on(both, photos):
    answer = both.predict([photos / "aside" / "owl" / "40.png"], PredictSettings(matcher="mqmk-ei"), top_k=1)[0]
    assert answer.matcher == "mqmk-ei" and len(answer.top) == 1


def test_what_was_saved_answers_the_same_after_loading(birds, both, photos, tmp_path):
    asked = [photos / "aside" / "owl" / "40.png", photos / "aside" / "crab" / "40.png"]
    birds.save(tmp_path / "pool")
    assert load(tmp_path / "pool").predict(asked) == birds.predict(asked)
    both.save(str(tmp_path / "pool"))
    assert load(str(tmp_path / "pool")).predict(asked) == both.predict(asked)
    assert sorted(PoolStore(tmp_path / "pool").paths()) == [1, 2]


def test_one_version_of_a_store_can_be_loaded(birds, both, tmp_path):
    birds.save(tmp_path)
    both.save(tmp_path)
    (first,) = PoolStore(tmp_path).paths()[1]
    assert load(first).tasks == ("birds",)


def test_an_exported_pool_can_be_loaded(both, photos, tmp_path):
    asked = [photos / "aside" / "owl" / "40.png", photos / "aside" / "crab" / "40.png"]
    exported = write_pool(both.pool, tmp_path, version=2, parent=1).folder
    assert load(tmp_path / exported).predict(asked) == both.predict(asked)


def test_a_backbone_that_is_at_hand_is_taken(birds, vit, tmp_path):
    birds.save(tmp_path)
    assert load(tmp_path, vit).backbone is vit


def test_a_pool_of_another_backbone_is_refused(birds):
    info = replace(birds.backbone.info, weights_sha256="0" * 64)
    with pytest.raises(PoolError, match=r"trained on embedded \(sha256 0{12}, 28 px\), not on embedded"):
        Classifier(birds.backbone, replace(birds.pool, backbone=info))


def test_a_backbone_that_cannot_be_found_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    name = "vit_tiny_patch16_224"
    random = load_backbone(name, weights=RANDOM, image_size=32)
    images = tmp_path / "few"
    save_sketches(images, "owl", 0, 2)
    Classifier(random).learn("birds", images, replace(QUICK, epochs=1)).save(tmp_path / "pool")
    with pytest.raises(
        BackboneError, match=f'mqmk.load_backbone\\("{name}", weights="FILE.safetensors", image_size=32'
    ):
        load(tmp_path / "pool")
    assert load(tmp_path / "pool", random).tasks == ("birds",)


def test_an_embedded_backbone_of_another_release_is_explained(birds, tmp_path):
    other = replace(birds.pool, backbone=replace(birds.backbone.info, weights_sha256="0" * 64))
    PoolStore(tmp_path).point_at(PoolStore(tmp_path).write(other, 1, None))
    with pytest.raises(
        BackboneError, match=r"sha256 0{12}, 28 px\), which was not found; use the release it came with"
    ):
        load(tmp_path)


def test_what_cannot_be_learned_is_refused_before_training(birds, photos, tmp_path):
    save_sketches(tmp_path / "data" / "train", "owl", 0, 2)
    (tmp_path / "empty" / "owl").mkdir(parents=True)
    with pytest.raises(PoolError, match="'birds' was already learned"):
        birds.learn("birds", photos / "birds", QUICK)
    with pytest.raises(SettingsError, match="g_prompt"):
        birds.learn("sea", photos / "sea", replace(QUICK, g_prompt="always"))
    with pytest.raises(LearnerError, match="found no folder"):
        birds.learn("sea", photos / "sea" / "crab", QUICK)
    with pytest.raises(LearnerError, match="give one of train"):
        birds.learn("sea", tmp_path / "data", QUICK)
    with pytest.raises(LearnerError, match="found none of owl"):
        birds.learn("sea", tmp_path / "empty", QUICK)


def test_an_unreadable_image_is_named(birds, tmp_path):
    (tmp_path / "owl").mkdir()
    (tmp_path / "owl" / "broken.jpg").write_bytes(b"not an image")
    with pytest.raises(ImageError, match=r"broken\.jpg: expected a JPEG"):
        birds.learn("more", tmp_path, QUICK)
    with pytest.raises(ImageError, match=r"broken\.jpg: expected a JPEG"):
        birds.predict([tmp_path / "owl" / "broken.jpg"])


def test_one_image_instead_of_a_list_is_explained(birds):
    with pytest.raises(TypeError, match=r"predict\(\[image\]\)"):
        birds.predict("owl.jpg")


def test_before_anything_was_learned_there_is_nothing_to_predict_or_save_or_load(vit, tmp_path):
    model = Classifier(vit)
    assert repr(model) == "Classifier(embedded, tasks: none)"
    with pytest.raises(MatchError, match=r"learn\(\) first"):
        model.predict(["owl.jpg"])
    with pytest.raises(PoolError, match=r"learn\(\) first"):
        model.save(tmp_path)
    with pytest.raises(PoolError, match=r"nowhere: expected an exported pool .*; found none"):
        load(tmp_path / "nowhere")
