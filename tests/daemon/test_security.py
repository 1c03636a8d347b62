"""What docs/security.md says of the daemon, tried: no code comes from data, no secret is told, no name is a path."""

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version
from programs.hostile.run import CANARY, CLASSES
from support import shards as tars
from support.builders import frozen, random_pool, random_timm_vit
from support.daemons.daemon import daemon, drop, small_config

from mqmk.daemon.bucket.scanner import Bucket
from mqmk.daemon.config.load import load
from mqmk.daemon.config.sections import Bucket as BucketSettings
from mqmk.daemon.errors import ConfigError, RegistryError
from mqmk.daemon.host.doctor import exposure
from mqmk.daemon.host.lock import DaemonLock
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.redaction import redact
from mqmk.daemon.registry.interface import install_pool
from mqmk.daemon.registry.mlflow_env import database_path
from mqmk.daemon.registry.mlflow_runs import write_files
from mqmk.daemon.registry.records import RegisteredVersion
from mqmk.learner.data.manifest import FILE_NAME
from mqmk.learner.training import checkpoint
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.errors import BackboneError, PoolError
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import CARD, TENSORS, PoolFiles, decode, encode, read_pool, write_pool
from mqmk.matcher.pool_store import Pointer, PoolStore

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = ROOT / "tests"


# ---- a hostile task, learned, recorded and shown in a process with canary secrets


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("life")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MQMK_")}
    command = [sys.executable, "-m", "programs.hostile.run", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=TESTS,
                          env=environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "output" / "terminal").write_text(done.stdout + done.stderr)
    return folder


@pytest.fixture(scope="module")
def audit(hostile_run: Path) -> dict[str, Any]:
    return dict(json.loads((hostile_run / "audit.json").read_text()))


def test_nothing_is_unpickled_while_a_task_is_learned_and_shown(audit: dict[str, Any]) -> None:
    assert audit["states"] == {"evil": "PUBLISHED"}
    assert [what for event, what in audit["everything"] if event == "pickle.find_class"] == []


def test_learning_connects_to_nothing_but_mlflow_and_starts_no_program_that_the_data_names(
    audit: dict[str, Any],
) -> None:
    started = {Path(what).name for event, what in audit["learning"] if not event.startswith(("socket", "pickle"))}
    assert started <= {Path(sys.executable).name, "git", "uname"}  # a fresh process, our commit, Python's own question
    hosts = {what for event, what in audit["learning"] if event == "socket.connect"}
    assert hosts, "MLflow was asked, in vain"
    assert all(re.fullmatch(r"\('127\.0\.0\.1', \d+\)", host) for host in hosts), hosts


def test_no_secret_is_logged_printed_recorded_or_kept(hostile_run: Path) -> None:
    leaks = [str(path.relative_to(hostile_run)) for path in hostile_run.rglob("*")
             if path.is_file() and CANARY.encode() in path.read_bytes()]  # fmt: skip
    assert leaks == []


def test_what_is_hidden_was_there_to_be_told(hostile_run: Path) -> None:
    """The test above can fail: the addresses with the passwords are in the log and in what the commands print."""
    output = {path.name: path.read_text() for path in (hostile_run / "output").iterdir()}
    assert "me:***@127.0.0.1" in output["log"]
    assert "MLflow is unavailable" in output["log"] and "bucket is down" in output["log"]
    for name in ("status-json", "config", "config-json", "doctor-json"):
        assert "me:***@127.0.0.1" in output[name], name
    assert "<script>alert(1)</script>" in output["show-evil-json"] + output["status-json"]


def test_names_of_classes_lead_nowhere(hostile_run: Path) -> None:
    assert {path.name for path in hostile_run.iterdir()} == {"bucket", "audit.json", "output", "state"}
    for folder in (hostile_run.parent, ROOT, ROOT / "tests", Path.cwd()):
        assert not list(folder.glob("*escaped*"))
    assert not [path for path in hostile_run.rglob("*") if "escaped" in path.name or "script" in path.name]


def test_names_of_classes_become_markup_nowhere(hostile_run: Path) -> None:
    pages = [path.read_text() for path in (hostile_run / "state").rglob("*.html")]
    assert pages, "an evaluation is shown as a page"
    assert not [page for page in pages if "<script>alert" in page or "<img src=x" in page]
    notes = (hostile_run / "state" / "mlflow" / "mlflow.db").read_bytes()
    assert CLASSES[0].replace("<", "\\<").replace(">", "\\>").encode() in notes  # Markdown that says what it is


# ---- secrets


@pytest.mark.parametrize(("text", "told"), [
    ("http://me:pw@host/x", "http://me:***@host/x"),
    ("no ftp://me:a/b@c@host: refused", "no ftp://me:***@host: refused"),
    ("https://ghp_token@host/x", "https://***@host/x"),
    ("postgresql://h/x?user=a&password=b&c=d, and more", "postgresql://h/x?user=a&password=***&c=d, and more"),
    ("s3://bucket/a@b", "s3://bucket/a@b"),
    ("at http://127.0.0.1:8000/x by me@host", "at http://127.0.0.1:8000/x by me@host"),
])  # fmt: skip
def test_a_password_is_hidden_wherever_it_stands(text: str, told: str) -> None:
    assert redact(text) == told
    assert redact(told) == told


def test_errors_about_settings_do_not_repeat_passwords(tmp_path: Path) -> None:
    with pytest.raises(RegistryError) as refused:
        database_path(f"postgresql://me:{CANARY}@host/db")
    assert CANARY not in str(refused.value)
    with pytest.raises(ConfigError) as wrong:
        load(environ={"MQMK_MLFLOW_TRACKING_URI": f"http://me:{CANARY}@host\x07"}, folder=tmp_path)
    assert CANARY not in str(wrong.value)


# ---- a pickle in every disguise


@pytest.fixture(params=["pickle", "torch.save"])
def attack(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[bytes, Path]:
    """Bytes that make a file when they are unpickled, tried once; and that file."""
    proof = tmp_path / "proof"

    class Exploit:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {proof}",)

    path = tmp_path / "attack"
    torch.save(Exploit(), path) if request.param == "torch.save" else path.write_bytes(pickle.dumps(Exploit()))
    torch.load(path, weights_only=False) if request.param == "torch.save" else pickle.loads(path.read_bytes())
    assert proof.exists(), "the attack works"
    proof.unlink()
    return path.read_bytes(), proof


def test_a_pickle_disguised_as_a_pool_is_refused_and_not_run(attack: tuple[bytes, Path], tmp_path: Path) -> None:
    data, proof = attack
    vit = frozen(random_timm_vit())
    pool = random_pool((2,), vit=vit)
    folder = tmp_path / "pools" / write_pool(pool, tmp_path / "pools", 1, None).folder
    (folder / TENSORS).write_bytes(data)
    with pytest.raises(PoolError, match="wrong sha256"):
        read_pool(folder)
    with pytest.raises(PoolError, match="not a safetensors file"):
        decode(PoolFiles(data, forged_card(pool, data)))
    store = PoolStore(tmp_path / "store")
    at = store.write(pool, 1, None)
    layer = store.card(at).tasks[0].layer
    (store.layers / f"{layer}.safetensors").write_bytes(data)
    with pytest.raises(PoolError, match="wrong sha256"):
        store.read(at)
    forged = hashlib.sha256(data).hexdigest()
    store.add_layer(f"{forged}.safetensors", data)
    card = (store.versions / at.card).read_bytes().replace(layer.encode(), forged.encode())
    named = Pointer(1, hashlib.sha256(card).hexdigest())
    store.add_card(named, card)
    with pytest.raises(PoolError, match="not a safetensors file"):
        store.read(named)
    assert not proof.exists()


def forged_card(pool: PromptPool, tensors: bytes) -> bytes:
    """A card whose hashes are right: whoever can write the store can compute them, too."""
    fields = json.loads(encode(pool, 1, None)[1].card)
    fields.pop("digest")
    fields["tensors_sha256"] = hashlib.sha256(tensors).hexdigest()
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({"digest": hashlib.sha256(canonical).hexdigest()} | fields).encode()


def test_a_pickle_disguised_as_weights_is_refused_and_not_run(attack: tuple[bytes, Path], tmp_path: Path) -> None:
    data, proof = attack
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    with pytest.raises(BackboneError, match="not weights for vit_tiny_patch16_224"):
        load_backbone("vit_tiny_patch16_224", weights=path)
    assert not proof.exists()


def test_a_pickle_disguised_as_a_checkpoint_is_no_checkpoint_and_not_run(
    attack: tuple[bytes, Path], tmp_path: Path
) -> None:
    data, proof = attack
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(data)
    assert checkpoint.read(path) is None  # training begins anew
    assert not proof.exists()


def test_a_pickle_among_the_shards_is_quarantined_with_its_place_and_not_run(
    attack: tuple[bytes, Path], tmp_path: Path
) -> None:
    data, proof = attack
    shards = {"x.png": "unreadable-image", "x.pth": "unknown-member", "x.pickle": "unknown-member"}
    for number, member in enumerate(shards):
        label = [("x.cls", b"heron")] if member == "x.png" else []
        shard = tars.tar([*label, (member, data), *tars.files(["heron", "owl"] * 6)])
        folder = tmp_path / "bucket" / "tasks" / f"task{number}"
        folder.mkdir(parents=True)
        (folder / "birds-000000.tar").write_bytes(shard)
        manifest = replace(tars.manifest(shard, samples=13 if label else 12), task=f"task{number}")
        (folder / FILE_NAME).write_bytes(manifest.to_bytes())
    parts = daemon(small_config(tmp_path))
    parts.run()
    found = {task.name: (task.state.value, task.code) for task in parts.ledger.tasks()}
    parts.close()
    assert found == {f"task{number}": ("QUARANTINED", code) for number, code in enumerate(shards.values())}
    assert not proof.exists()


# ---- names that want to be paths, URLs or commands


@pytest.mark.parametrize("name", ["../evil", "/evil", "pipe:touch evil", "http://localhost/x", "s3://evil/x", "a\nb"])
def test_a_name_that_is_no_plain_name_is_quarantined_and_opens_nothing(tmp_path: Path, name: str) -> None:
    drop(tmp_path / "bucket", "sea", per_class=6)
    path = tmp_path / "bucket" / "tasks" / "sea" / FILE_NAME
    fields = json.loads(path.read_text())
    before = {each for each in tmp_path.rglob("*") if "bucket" in str(each)}
    for evil in ({"task": name}, {"shards": [fields["shards"][0] | {"name": f"{name}.tar"}]}):
        path.write_text(json.dumps(fields | evil))
        parts = daemon(small_config(tmp_path, bucket=BucketSettings(url=str(tmp_path / "bucket"), settle_seconds=0)))
        parts.run()
        (task,) = parts.ledger.tasks()
        parts.close()
        assert (task.name, task.state.value, task.code) == ("sea", "QUARANTINED", "bad-manifest")
        assert name not in str(task.reason) or name.isprintable()
    assert {each for each in tmp_path.rglob("*") if "bucket" in str(each)} == before


def test_a_registry_cannot_put_a_pool_outside_the_store(tmp_path: Path) -> None:
    _, files = encode(random_pool((2,), vit=frozen(random_timm_vit())), 1, None)
    told = RegisteredVersion(1, "/../../evil-000000", None, "learn", "effect")
    store = PoolStore(tmp_path / "state" / "pools")
    with pytest.raises(RegistryError, match="expected"):
        install_pool({TENSORS: files.tensors, CARD: files.card}, told, store)
    layers = dict.fromkeys(("layers/../../evil", "layers//evil", "layers/../evil.safetensors", "/evil"), b"x")
    with pytest.raises(PoolError, match="wrong sha256"):
        install_pool({f"1-{told.digest[:12]}.json": files.card, **layers}, told, store)
    assert [*tmp_path.rglob("*")] == []


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a" * 63 + "/", "", "A" * 64, "0" * 64 + "\n"])
def test_a_card_cannot_name_a_layer_outside_the_store(tmp_path: Path, name: str) -> None:
    store = PoolStore(tmp_path / "pools")
    at = store.write(random_pool((2,), vit=frozen(random_timm_vit())), 1, None)
    fields = json.loads((store.versions / at.card).read_bytes())
    for change in ({"g": name}, {"pages": [name]}, {"tasks": [fields["tasks"][0] | {"layer": name}]}):
        card = json.dumps(fields | change).encode()
        evil = Pointer(2, hashlib.sha256(card).hexdigest())
        store.add_card(evil, card)
        with pytest.raises(PoolError, match="expected a sha256"):
            store.read(evil)


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", ""])
def test_no_file_is_recorded_under_a_name_outside_its_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(RegistryError, match="expected a file name"):
        write_files({name: b"x"}, tmp_path / "run")


# ---- other users of the machine


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("usual_umask")
def test_a_ledger_and_its_folder_are_for_the_owner_only_whoever_makes_them(tmp_path: Path) -> None:
    Ledger(tmp_path / "state" / "ledger.sqlite").close()  # as a command may before the first start
    DaemonLock(tmp_path / "locked").take().release()
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("state", "locked")] == [0o700, 0o700]
    for file in (tmp_path / "state" / "ledger.sqlite", tmp_path / "locked" / "daemon.lock"):
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_of_keys_that_others_may_write_is_reported(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    config = load(environ={"MQMK_SERVE_API_KEYS": str(keys)}, folder=tmp_path).config
    assert exposure(config)[0] == "ok"
    keys.chmod(0o620)
    assert exposure(config)[::2] == ("warn", f"chmod go-w {keys}")


@pytest.fixture
def shared_bucket(tmp_path: Path) -> Path:
    """A bucket with a good task, in which a link was put."""
    drop(tmp_path / "bucket", "sea", per_class=6)
    return tmp_path / "bucket" / "tasks"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a link that belongs to somebody else")
def test_links_of_other_users_are_not_followed(tmp_path: Path, shared_bucket: Path) -> None:
    drop(tmp_path / "private", "fruit", per_class=6)
    (shared_bucket / "folder").symlink_to(tmp_path / "private" / "tasks" / "fruit")
    (shared_bucket / "files").mkdir()
    for path in (tmp_path / "private" / "tasks" / "fruit").iterdir():
        (shared_bucket / "files" / path.name).symlink_to(path)
    links = [shared_bucket / "folder", *(shared_bucket / "files").iterdir()]
    for link in links:
        os.chown(link, 12345, 12345, follow_symlinks=False)
    bucket = Bucket(str(tmp_path / "bucket"), settle_seconds=0)
    for everything in (False, True):
        assert [seen.folder for seen in bucket.scan({}, everything=everything)] == ["sea"]
    with pytest.raises(FileNotFoundError):
        bucket.open_shard("files", "fruit-000000.tar")
    for link in links:
        os.chown(link, os.getuid(), os.getgid(), follow_symlinks=False)
    assert {seen.folder for seen in bucket.scan({})} == {"sea", "folder", "files"}, "one's own are followed"


def test_a_link_to_itself_stops_nobody_elses_task(tmp_path: Path, shared_bucket: Path) -> None:
    (shared_bucket / "loop").symlink_to("loop")
    (shared_bucket / "inside").mkdir()
    (shared_bucket / "inside" / FILE_NAME).symlink_to(FILE_NAME)
    bucket = Bucket(str(tmp_path / "bucket"), settle_seconds=0)
    for everything in (False, True):
        assert [seen.folder for seen in bucket.scan({}, everything=everything)] == ["sea"]


# ---- the page about it


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 30
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()] == []


# ---- dependencies


FLOORS = {"pillow": "13.0.0", "ray": "2.52", "torch": "2.10", "mlflow": "3.17.2"}
"""What older releases get wrong: decoders; open ports without a token; `torch.load`; paths out of the file store."""


@pytest.mark.parametrize("name", FLOORS)
def test_neither_installed_nor_accepted_is_a_release_with_a_known_hole(name: str) -> None:
    assert Version(version(name)) >= Version(FLOORS[name])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = (each for each in map(Requirement, project["dependencies"]) if each.name.lower() == name)
    floor = Version(FLOORS[name])
    older = f"{floor.major}.{floor.minor - 1}.99" if floor.minor else f"{floor.major - 1}.99"
    assert not wanted.specifier.contains(older)
