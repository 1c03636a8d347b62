"""Packing folders of images: every kind of source, the same bytes every time, nothing half done."""

import csv
import json
import tarfile
from collections import Counter

import pytest
from support import shards as tars

from mqmk.learner.data.manifest import parse_manifest
from mqmk.learner.data.pack import pack, pack_images
from mqmk.learner.data.pack_sources import find_images
from mqmk.learner.data.shards import held_out_samples, training_samples
from mqmk.learner.data.validation import validate_task
from mqmk.learner.errors import PackError
from mqmk.learner.settings import ShardLimits

KINDS = {"jpg": "JPEG", "jpeg": "JPEG", "png": "PNG", "webp": "WEBP", "JPG": "JPEG"}


def add(path, seed, kind=None):
    """Write an image, in the format its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tars.image_bytes(seed, kind=kind or KINDS[path.suffix[1:]]))


@pytest.fixture
def folder(tmp_path):
    """Class folders with images of every format, some deeper, with the litter that systems leave."""
    root = tmp_path / "photos"
    for seed, name in enumerate(["a.jpg", "b.jpeg", "c.png", "d.webp", "e f.g.JPG", "more/a.jpg"]):
        add(root / "heron" / name, seed)
        add(root / "Eule ü" / name, 50 + seed)
    (root / "heron" / ".DS_Store").write_bytes(b"\0")
    (root / "heron" / "Thumbs.db").write_bytes(b"\0")
    (root / ".cache").mkdir()
    (root / "README.md").write_text("my birds")
    return root


def opener(bucket, task="birds"):
    return lambda name: (bucket / task / name).open("rb")


def labels(source):
    return Counter(image.label for image in find_images(source))


def test_class_folders_become_a_task_that_validates(folder, tmp_path):
    bucket = tmp_path / "tasks"
    manifest = pack(folder, bucket, "birds", holdout=0.25)
    assert sorted(path.name for path in (bucket / "birds").iterdir()) == ["TASK.json", "birds-000000.tar"]
    assert [path.name for path in bucket.iterdir()] == ["birds"]
    assert parse_manifest((bucket / "birds" / "TASK.json").read_bytes()) == manifest
    assert (manifest.classes, manifest.holdout, manifest.completeness) == (("Eule ü", "heron"), 0.25, "manifest")
    report = validate_task(manifest, opener(bucket), ShardLimits(min_samples=6))
    assert report.samples == {"Eule ü": 6, "heron": 6}


def test_images_come_back_byte_for_byte_under_their_labels(folder, tmp_path):
    manifest = pack(folder, tmp_path / "tasks", "birds")
    training = training_samples(manifest, opener(tmp_path / "tasks"), seed=0, shuffle_buffer=4)
    samples = [*training, *held_out_samples(manifest, opener(tmp_path / "tasks"))]
    packed = sorted((manifest.classes[sample.label], sample.image) for sample in samples)
    assert packed == sorted((image.label, image.path.read_bytes()) for image in find_images(folder))


def test_the_label_is_stored_as_the_class_name(folder, tmp_path):
    pack(folder, tmp_path / "tasks", "birds")
    with tarfile.open(tmp_path / "tasks" / "birds" / "birds-000000.tar") as archive:
        names = archive.getnames()
        label = archive.extractfile(names[0]).read().decode()
    assert names[0].endswith(".cls")
    assert label in ("Eule ü", "heron")


def test_packing_twice_gives_the_same_bytes_wherever_the_folder_is(folder, tmp_path):
    first = pack(folder, tmp_path / "one", "birds", shard_size=2000)
    moved = folder.rename(tmp_path / "moved")
    for path in moved.rglob("*"):
        path.touch()
    second = pack(moved, tmp_path / "two", "birds", shard_size=2000)
    assert second.shards == first.shards
    assert second.identity == first.identity
    assert pack(moved, tmp_path / "two", "vögel", shard_size=2000).identity == first.identity


def test_shards_have_about_the_size_that_was_asked_for(folder, tmp_path):
    manifest = pack(folder, tmp_path / "tasks", "birds", shard_size=1)
    assert [shard.samples for shard in manifest.shards] == [1] * 12
    assert manifest.shards[11].name == "birds-000011.tar"
    assert validate_task(manifest, opener(tmp_path / "tasks")).samples == {"Eule ü": 6, "heron": 6}


def test_classes_are_mixed_within_a_shard(tmp_path):
    for seed in range(60):
        add(tmp_path / "photos" / ("heron" if seed < 30 else "owl") / f"{seed}.png", seed)
    manifest = pack(tmp_path / "photos", tmp_path / "tasks", "birds", shard_size=15_000)
    assert len(manifest.shards) > 2
    with tarfile.open(tmp_path / "tasks" / "birds" / manifest.shards[0].name) as archive:
        seen = {archive.extractfile(name).read() for name in archive.getnames() if name.endswith(".cls")}
    assert seen == {b"heron", b"owl"}


def test_progress_is_reported_image_by_image(folder, tmp_path):
    calls = []
    pack(folder, tmp_path / "tasks", "birds", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(number, 12) for number in range(1, 13)]


# ---- kinds of sources


def test_split_folders_of_class_folders_are_put_together(tmp_path):
    for seed, name in enumerate(["train/heron/1.png", "train/owl/1.png", "test/owl/1.png", "validation/heron/1.png"]):
        add(tmp_path / name, seed)
    assert labels(tmp_path) == {"heron": 2, "owl": 2}


def test_folders_named_like_splits_with_images_in_them_are_classes(tmp_path):
    add(tmp_path / "train" / "1.png", 1)
    add(tmp_path / "test" / "1.png", 2)
    assert labels(tmp_path) == {"train": 1, "test": 1}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("splits", [("",), ("train", "test")])
def test_a_hugging_face_folder_with_metadata_is_read(tmp_path, kind, splits):
    for number, split in enumerate(splits):
        rows = [{"file_name": "a.png", "label": "heron"}, {"file_name": "deep/b.png", "label": 7}]
        for seed, row in enumerate(rows):
            add(tmp_path / split / row["file_name"], 10 * number + seed)
        write_rows(tmp_path / split / f"metadata.{kind}", rows)
    assert labels(tmp_path) == {"heron": len(splits), "7": len(splits)}
    assert pack(tmp_path, tmp_path / "tasks", "birds").classes == ("7", "heron")


def write_rows(path, rows):
    with path.open("w", newline="") as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


@pytest.mark.parametrize("columns", ["image,label", "path,class", "File, Label", "file_name,label", "\ufefffile,class"])
def test_a_table_with_images_is_read_by_file_or_by_folder(tmp_path, columns):
    add(tmp_path / "images" / "a.png", 1)
    add(tmp_path / "images" / "b.png", 2)
    table = tmp_path / "labels.csv"
    table.write_text(f"{columns}\nimages/a.png,heron\nimages/b.png,0\n")
    assert labels(table) == labels(tmp_path) == {"heron": 1, "0": 1}


# ---- what is refused, with the name of the file


def refused(source, reason, tmp_path, **options):
    with pytest.raises(PackError, match=reason):
        pack(source, tmp_path / "tasks", options.pop("task", "birds"), **options)
    assert not (tmp_path / "tasks").exists() or not list((tmp_path / "tasks").iterdir())


def test_an_existing_task_is_never_overwritten(folder, tmp_path):
    pack(folder, tmp_path / "tasks", "birds")
    before = (tmp_path / "tasks" / "birds" / "TASK.json").read_bytes()
    with pytest.raises(PackError, match=r"birds exists, and tasks are never overwritten; choose another --task"):
        pack(folder, tmp_path / "tasks", "birds")
    assert (tmp_path / "tasks" / "birds" / "TASK.json").read_bytes() == before


def test_a_task_that_appears_meanwhile_is_not_overwritten_either(folder, tmp_path):
    def somebody_else(done, total):
        if done == total:
            (tmp_path / "tasks" / "birds").mkdir()
            (tmp_path / "tasks" / "birds" / "TASK.json").write_text("theirs")

    with pytest.raises(PackError, match="another process created it meanwhile"):
        pack(folder, tmp_path / "tasks", "birds", progress=somebody_else)
    assert (tmp_path / "tasks" / "birds" / "TASK.json").read_text() == "theirs"
    assert [path.name for path in (tmp_path / "tasks").iterdir()] == ["birds"]


def test_an_unreadable_image_is_named_and_nothing_is_left_behind(folder, tmp_path):
    (folder / "heron" / "c.png").write_bytes(b"hello")
    refused(folder, r"heron/c\.png: expected a JPEG, PNG or WebP image", tmp_path)


def test_a_truncated_image_is_named(folder, tmp_path):
    path = folder / "heron" / "c.png"
    path.write_bytes(path.read_bytes()[:-40])
    refused(folder, r"heron/c\.png: unreadable image", tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "x", "x.jfif"])
def test_files_that_are_not_named_like_images_are_named(folder, tmp_path, name):
    (folder / "heron" / name).write_bytes(b"hello")
    refused(folder, f"heron/{name}: expected a name that ends in jpg, jpeg, png, webp; rename or remove it", tmp_path)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "AVIF"])
def test_other_formats_are_named_and_packed_where_they_are_allowed(folder, tmp_path, kind):
    add(folder / "heron" / f"x.{kind.lower()}", 1, kind=kind)
    refused(folder, f"heron/x.{kind.lower()}: .*got {kind}: not supported; convert it to ", tmp_path)
    limits = ShardLimits(formats=(kind.lower(),))
    manifest = pack(folder, tmp_path / "tasks", "birds", limits=limits)
    assert validate_task(manifest, opener(tmp_path / "tasks"), limits).samples == {"Eule ü": 6, "heron": 7}


def test_all_bad_files_are_listed_at_once_and_can_be_left_out(folder, tmp_path):
    (folder / "heron" / "c.png").write_bytes(b"hello")
    (folder / "Eule ü" / "a.jpg").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (folder / "Eule ü" / "notes.txt").write_text("my owls")
    with pytest.raises(PackError) as caught:
        pack(folder, tmp_path / "tasks", "birds")
    first, *files = str(caught.value).splitlines()
    assert first.startswith("3 of 13 files cannot be packed") and "--skip-bad" in first
    assert [line.split(":")[0].strip().removeprefix(f"{folder}/") for line in sorted(files)] == [
        "Eule ü/a.jpg", "Eule ü/notes.txt", "heron/c.png",
    ]  # fmt: skip
    assert "got HEIC: not supported; convert it to JPEG" in str(caught.value)
    assert not list((tmp_path / "tasks").iterdir())
    packed = pack_images(folder, tmp_path / "tasks", "birds", skip_bad=True)
    assert packed.counts == {"Eule ü": 5, "heron": 5}
    assert len(packed.skipped) == 3 and packed.warnings == ()
    assert validate_task(packed.manifest, opener(tmp_path / "tasks")).samples == packed.counts


def test_a_class_of_bad_files_only_is_left_out_with_a_warning_and_a_task_of_them_refused(folder, tmp_path):
    (folder / "crow").mkdir()
    (folder / "crow" / "a.png").write_bytes(b"hello")
    packed = pack_images(folder, tmp_path / "tasks", "birds", skip_bad=True)
    assert packed.manifest.classes == ("Eule ü", "heron")
    assert packed.warnings == ("no image of crow can be read: left out",)
    (tmp_path / "only" / "crow").mkdir(parents=True)
    (tmp_path / "only" / "crow" / "a.png").write_bytes(b"hello")
    with pytest.raises(PackError, match="1 of 1 files cannot be packed"):
        pack(tmp_path / "only", tmp_path / "more", "birds", skip_bad=True)


def test_what_is_probably_not_meant_is_warned_of(folder, tmp_path):
    add(folder / "crow" / "a.png", 77)
    add(folder / "left.png", 78)
    add(folder / "train" / "gull" / "a.png", 79)
    add(folder / "train" / "gull" / "b.png", 80)
    packed = pack_images(folder, tmp_path / "tasks", "birds")
    assert packed.counts == {"Eule ü": 6, "crow": 1, "heron": 6, "train": 2}
    loose, layout, single = packed.warnings
    assert loose == "1 images beside the class folders have no class and are left out, e.g. left.png"
    assert layout.startswith("train: taken for the name of a class") and f"pack {folder}/train ..." in layout
    assert single.startswith("only one image of crow: the daemon will quarantine the task")


def test_splits_that_are_put_together_are_mentioned_with_what_to_type_for_one(tmp_path):
    for seed, name in enumerate(["train/heron/1.png", "train/heron/2.png", "test/heron/3.png"]):
        add(tmp_path / "photos" / name, seed)
    packed = pack_images(tmp_path / "photos", tmp_path / "tasks", "birds")
    assert packed.counts == {"heron": 3}
    (warning,) = packed.warnings
    assert warning.startswith("test, train are merged") and f"pack {tmp_path}/photos/test ..." in warning


def test_a_folder_of_images_says_what_to_type(folder, tmp_path):
    refused(folder / "heron" / "more", "heron/more: holds images, not a folder for each class; type "
            f"`mqmk-daemon pack {folder}/heron ...` to pack all classes beside more", tmp_path)  # fmt: skip


def test_an_image_of_another_format_in_disguise_is_named(folder, tmp_path):
    add(folder / "heron" / "z.png", 1, kind="BMP")
    refused(folder, r"heron/z\.png: expected a JPEG, PNG or WebP", tmp_path)


def test_an_empty_class_is_named(folder, tmp_path):
    (folder / "crow").mkdir()
    (folder / "crow" / ".DS_Store").write_bytes(b"")
    refused(folder, "crow: expected images of class crow, the folder is empty", tmp_path)


def test_an_empty_or_missing_source_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty: expected folders named after classes", tmp_path)
    refused(tmp_path / "nowhere", "nowhere: no such file or folder", tmp_path)
    (tmp_path / "birds.zip").write_bytes(b"PK")
    refused(tmp_path / "birds.zip", r"birds\.zip: expected a folder, a \.csv or a \.jsonl", tmp_path)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("image,label\na.png,heron\na.png,owl\n", r"a\.png: expected every image once"),
        ("image,label\na.png,\n", "line 2: expected a column .*both filled"),
        ("image,kind\na.png,heron\n", "line 2: expected a column"),
        ("image,label\n../a.png,heron\n", "line 2: expected an image below"),
        ("image,label\n/etc/passwd,heron\n", "line 2: expected an image below"),
        ("image,label\nb.png,heron\n", r"b\.png: No such file"),
        ("image,label\n", "found no image"),
        ('image,label\na.png,"x\x07y"\n', "expected a printable class name"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused_with_its_line(tmp_path, table, reason):
    add(tmp_path / "photos" / "a.png", 1)
    (tmp_path / "photos" / "labels.csv").write_text(table)
    refused(tmp_path / "photos", reason, tmp_path)


def test_of_two_tables_one_must_be_named(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("image,label\n")
    refused(tmp_path, r"expected one \.csv, found 2; name the one to pack", tmp_path)


@pytest.mark.parametrize("data", [b"\xff\xfe\xff", b"[1]\n", b"{\n"])
def test_a_damaged_metadata_file_is_named(tmp_path, data):
    (tmp_path / "metadata.jsonl").write_bytes(data)
    refused(tmp_path, r"metadata\.jsonl: expected rows", tmp_path)


@pytest.mark.parametrize("task", ["../birds", "a/b", "", ".birds", "pipe:x"])
def test_names_that_are_no_plain_name_are_refused(folder, tmp_path, task):
    refused(folder, "expected a task name", tmp_path, task=task)


@pytest.mark.parametrize("options", [{"holdout": 1.0}, {"holdout": -0.1}, {"shard_size": 0}])
def test_settings_out_of_range_are_refused(folder, tmp_path, options):
    refused(folder, "expected 0 <= holdout < 1 and a shard size above 0", tmp_path, **options)
