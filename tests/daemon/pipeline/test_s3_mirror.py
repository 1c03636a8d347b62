"""The pool store on S3 follows the local one: after kills, through outages, and never over another daemon's pointer."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.builders import random_task
from support.daemons.daemon import Parts, daemon, drop, small_config
from support.servers.s3 import S3, S3Proxy

from mqmk.daemon import failpoints
from mqmk.daemon.app import mirror_for
from mqmk.daemon.config.sections import Config, Gate, Pools
from mqmk.daemon.ledger.ledger import Ledger, State
from mqmk.daemon.pipeline.s3_mirror import CHECK_SECONDS, PLACE, RETRY_SECONDS, S3Mirror
from mqmk.daemon.registry.mlflow_registry import MlflowRegistry
from mqmk.daemon.state_dir import StateDir
from mqmk.deploy.serving.pools.s3_store import RemotePools, open_remote_pools
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool import PromptPool

FOLLOW = """
import sys
from pathlib import Path
from mqmk.daemon.ledger.ledger import Ledger
from mqmk.daemon.pipeline.s3_mirror import S3Mirror
from mqmk.daemon.state_dir import StateDir
from mqmk.deploy.serving.pools.s3_store import open_remote_pools

state, url, cache = sys.argv[1:]
remote = open_remote_pools(url, Path(cache))
S3Mirror(Ledger(Path(state) / "ledger.sqlite"), StateDir(Path(state)).store, remote).follow(0.0)
"""


def an_empty_pool(mark: float) -> PromptPool:
    import torch

    vit = load_backbone()
    return PromptPool(vit.info, (0, 1), tuple(range(2, vit.depth)), torch.full((2, 2, 5, vit.dim), mark))


class Store:
    """A state directory whose ledger and pool store know a few versions, and the store on S3 beside it."""

    def __init__(self, folder: Path, url: str, mark: float = 0.5) -> None:
        self.folder, self.url, self.mark = folder / "state", url, mark
        self.cache = folder / "cache"
        self.folder.mkdir(parents=True)
        self.files, self.ledger = StateDir(self.folder), Ledger(self.folder / "ledger.sqlite")
        self.remote: RemotePools = open_remote_pools(url, self.cache)
        self.mirror = S3Mirror(self.ledger, self.files.store, self.remote)

    def publish(self) -> Pointer:
        number = self.ledger.next_version()
        identity = self.files.store.write(an_empty_pool(self.mark + number), number, number - 1 or None)
        plan = self.ledger.plan_version(number, identity.digest, identity.parent, "forget", [], {})
        self.ledger.finish_version(plan, {})
        self.files.store.point_at(identity)
        return Pointer(number, identity.digest)

    def health(self) -> tuple[bool, str] | None:
        return next(((each.up, each.message) for each in self.ledger.health() if each.dependency == "pools"), None)


@pytest.fixture
def state(s3_environment: S3, tmp_path: Path) -> Store:
    return Store(tmp_path, s3_environment.url())


def test_the_store_follows_forward_and_back(state: Store) -> None:
    state.mirror.follow(0.0)
    assert state.remote.current() is None
    first = state.publish()
    state.mirror.follow(1.0)
    assert state.remote.current() == first and state.health() == (True, "")
    second = state.publish()
    state.mirror.follow(2.0)
    assert state.remote.current() == second
    state.files.store.point_at(first)
    state.mirror.follow(3.0)
    assert state.remote.current() == first
    assert all(state.remote.read(each) for each in (first, second))


def test_a_version_that_was_never_current_on_s3_is_copied_when_it_becomes_so(state: Store) -> None:
    first, _ = state.publish(), state.publish()
    state.mirror.follow(0.0)
    state.files.store.point_at(first)
    state.mirror.follow(1.0)
    assert state.remote.current() == first and state.remote.read(first)


def test_nothing_is_asked_while_nothing_is_published_but_now_and_then(
    s3_environment: S3, s3_proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    state = Store(tmp_path, s3_environment.url())
    state.publish()
    state.mirror.follow(0.0)
    s3_proxy.requests.clear()
    for now in (1.0, 5.0, CHECK_SECONDS - 1):
        state.mirror.follow(now)
    assert s3_proxy.requests == []
    state.mirror.follow(CHECK_SECONDS + 1)
    assert len(s3_proxy.requests) == 1


def test_while_the_store_is_away_it_is_reported_and_when_it_is_back_it_catches_up(
    s3_environment: S3, s3_proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    state = Store(tmp_path, s3_environment.url())
    state.publish()
    state.mirror.follow(0.0)
    s3_proxy.disconnect()
    second = state.publish()
    state.mirror.follow(1.0)
    up, says = state.health() or (True, "")
    assert not up and "Could not connect" in says
    s3_proxy.reconnect()
    state.mirror.follow(1.0 + RETRY_SECONDS / 2)  # too soon
    assert state.health() == (False, says)
    state.mirror.follow(1.0 + RETRY_SECONDS)
    assert state.remote.current() == second and state.health() == (True, "")


@pytest.mark.parametrize("point", [each for each in failpoints.POINTS if each.startswith("mirror.")])
def test_killed_at_any_step_the_next_life_ends_with_the_current_version_there(state: Store, point: str) -> None:
    first = state.publish()
    state.mirror.follow(0.0)
    second = state.publish()
    state.ledger.close()
    command = [sys.executable, "-c", FOLLOW, str(state.folder), state.url, str(state.cache)]
    died = subprocess.run(command, env={**os.environ, failpoints.VARIABLE: point}, check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    there = state.remote.current()
    assert there is not None and there == (second if point in ("mirror.pointed", "mirror.removing") else first)
    assert state.remote.read(there), "what CURRENT names can be served, whenever it is looked at"
    again = Ledger(state.folder / "ledger.sqlite")
    S3Mirror(again, state.files.store, state.remote).follow(0.0)
    assert state.remote.current() == second and state.remote.read(second)
    again.close()


def test_another_daemons_pointer_is_left_alone_and_the_reason_is_reported(state: Store, tmp_path: Path) -> None:
    theirs = state.publish()
    state.mirror.follow(0.0)
    other = Store(tmp_path / "other", state.url, mark=0.7)
    other.publish()
    other.mirror.follow(0.0)
    up, says = other.health() or (True, "")
    assert not up and f"names {theirs.card}, which is not a version of this daemon" in says
    assert state.remote.current() == theirs
    state.publish()
    state.mirror.follow(1.0)
    assert state.health() == (True, ""), "the first one goes on"


def test_a_state_directory_older_than_the_store_goes_on_once_current_is_removed(
    state: Store, s3_environment: S3, tmp_path: Path
) -> None:
    state.publish()
    state.mirror.follow(0.0)
    restored = Store(tmp_path / "restored", state.url, mark=0.9)
    mine = restored.publish()
    restored.mirror.follow(0.0)
    assert restored.health() != (True, "")
    s3_environment.files.rm_file(f"{state.url.removeprefix('s3://')}/pools/CURRENT")
    restored.mirror.follow(RETRY_SECONDS)
    assert restored.remote.current() == mine and restored.health() == (True, "")


def config_of(folder: Path, url: str | None) -> Config:
    config = small_config(folder, gate=Gate(accuracy_floor=0.0, fresh_process=False))
    return replace(config, pools=Pools(url=url, cache=folder / "cache"))  # type: ignore[arg-type]


def health(parts: Parts) -> dict[str, bool]:
    return {each.dependency: each.up for each in parts.ledger.health()}


def test_tasks_are_learned_and_published_while_the_store_is_away_and_it_catches_up(
    s3_environment: S3, s3_proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_proxy.endpoint)
    url = s3_environment.url()
    parts = daemon(config_of(tmp_path, url))
    s3_proxy.disconnect()
    drop(tmp_path / "bucket", "sea", per_class=6)
    parts.run()
    assert parts.states == {"sea": "PUBLISHED"} and health(parts)["pools"] is False
    s3_proxy.reconnect()
    later = time.time() + RETRY_SECONDS
    parts.outbound._clock = lambda: later
    parts.run()
    current = parts.files.store.current()
    assert current and health(parts)["pools"] is True
    remote = open_remote_pools(url, tmp_path / "machine")
    assert remote.current() == current
    assert [task.name for task in remote.read(current).tasks] == ["sea"]
    parts.close()


def test_without_a_url_there_is_no_mirror(tmp_path: Path) -> None:
    config = config_of(tmp_path, None)
    config.state.dir.mkdir()
    ledger = Ledger(config.ledger_file)
    assert mirror_for(config, ledger, StateDir(config.state.dir)) is None
    ledger.close()


def test_a_forgotten_task_is_erased_from_the_store_from_s3_and_from_mlflow_and_events_say_what(
    s3_environment: S3, tmp_path: Path
) -> None:
    url = s3_environment.url()
    config = config_of(tmp_path, url)
    registry = MlflowRegistry(config.tracking_uri, config.artifacts_folder)
    parts = daemon(config, registry=registry)
    drop(tmp_path / "bucket", "sea", per_class=6)
    parts.run()
    drop(tmp_path / "bucket", "birds", per_class=6)
    parts.run()
    store = parts.files.store
    tasks = {task.name: task for task in store.card(store.current()).tasks}
    layers = {name: sorted(f"{layer}.safetensors" for layer in (task.layer, task.statistics))
              for name, task in tasks.items()}  # fmt: skip

    def places(name: str) -> dict[str, bool]:
        found = s3_environment.files.find(f"{url.removeprefix('s3://')}/pools")
        return {
            "store": any(path.name == name for path in store.folder.rglob("*")),
            "s3": any(path.endswith(f"/layers/{name}") for path in found),
            "mlflow": any(path.name == name for path in config.artifacts_folder.rglob("*")),
        }

    everywhere, nowhere = (dict.fromkeys(("store", "s3", "mlflow"), is_there) for is_there in (True, False))
    assert all(places(name) == everywhere for own in layers.values() for name in own)
    parts.ledger.enqueue_command("forget", "birds")
    parts.run()
    assert parts.states == {"sea": "PUBLISHED", "birds": "FORGOTTEN"}
    assert all(places(name) == nowhere for name in layers["birds"])
    assert all(places(name) == everywhere for name in layers["sea"])
    remote = open_remote_pools(url, tmp_path / "machine")
    assert {*remote.versions()} <= {path.name for path in store.versions.iterdir()} and remote.read(store.current())
    (birds,) = parts.ledger.tasks_named("birds")
    erased = {each.detail["place"]: each.detail["deleted"] for each in parts.ledger.events(birds)
              if each.event == "task.erased"}  # fmt: skip
    assert erased.keys() == {"s3", "mlflow"} and sorted(erased["s3"]) == layers["birds"]
    assert sorted(name.partition("/")[2] for name in erased["mlflow"]) == [f"layers/{name}" for name in layers["birds"]]
    last = parts.ledger.last_event()
    parts.run()
    assert parts.ledger.last_event() == last, "once"
    parts.close()
    registry.close()


def test_a_task_is_not_called_erased_while_the_local_store_has_a_version_with_it(state: Store) -> None:
    """The mirror works beside the daemon's loop, which removes such versions a moment after the task is forgotten."""
    task = state.ledger.add_task("birds", "birds", "x", State.TRAINED, identity="d" * 64)
    kept = state.publish()
    pool = replace(an_empty_pool(0.1), tasks=(random_task("birds", 2, layers=4, dim=128),))
    at = state.files.store.write(pool, 2, 1)
    state.ledger.finish_version(state.ledger.plan_version(2, at.digest, 1, "learn", [task], {}), {})
    gone = state.files.store.card(at).files - state.files.store.card(kept).files
    state.files.store.point_at(at)
    state.mirror.follow(0.0)
    task = state.ledger.task(task.id)
    state.files.store.point_at(kept)
    state.ledger.transition(task.id, task.state, State.FORGOTTEN, task.attempt, "task.forgotten", {}, erased=[])
    state.mirror.follow(1.0)
    assert [each.id for each in state.ledger.tasks_to_erase(PLACE)] == [task.id]
    state.files.store.remove(state.files.store.versions / at.card)
    state.mirror.follow(2.0)
    assert state.ledger.tasks_to_erase(PLACE) == []
    (erased,) = [each for each in state.ledger.events() if each.event == "task.erased"]
    assert set(erased.detail["deleted"]) == gone, "its layer, and the g layer of that version"
    assert state.remote.versions() == [kept.card]
