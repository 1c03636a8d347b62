"""The pool store on S3 follows the local one: after kills, through outages, and never over another daemon's pointer."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from daemon_parts import Parts, daemon, drop, small_config
from s3 import S3, Line

from mqmk.daemon import crash_points
from mqmk.daemon.config import Config, Gate, Pools
from mqmk.daemon.ledger import Ledger, State
from mqmk.daemon.pool_mirror import LOOK_SECONDS, RETRY_SECONDS, PoolMirror
from mqmk.daemon.service import mirror_for
from mqmk.daemon.state_files import StateFiles
from mqmk.deploy.remote_pools import RemotePools, open_remote_pools
from mqmk.matcher.backbone import load_backbone
from mqmk.matcher.pointer import Pointer
from mqmk.matcher.pool import PromptPool

FOLLOW = """
import sys
from pathlib import Path
from mqmk.daemon.ledger import Ledger
from mqmk.daemon.pool_mirror import PoolMirror
from mqmk.daemon.state_files import StateFiles
from mqmk.deploy.remote_pools import open_remote_pools

state, url, cache = sys.argv[1:]
remote = open_remote_pools(url, Path(cache))
PoolMirror(Ledger(Path(state) / "ledger.sqlite"), StateFiles(Path(state)).store, remote).follow(0.0)
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
        self.files, self.ledger = StateFiles(self.folder), Ledger(self.folder / "ledger.sqlite")
        self.remote: RemotePools = open_remote_pools(url, self.cache)
        self.mirror = PoolMirror(self.ledger, self.files.store, self.remote)

    def publish(self) -> Pointer:
        number = self.ledger.next_version()
        identity = self.files.store.write(an_empty_pool(self.mark + number), number, number - 1 or None)
        plan = self.ledger.plan_version(number, identity.digest, identity.parent, "forget", None, {})
        self.ledger.finish_version(plan, State.FORGOTTEN, {})
        self.files.store.point_at(identity)
        return Pointer(number, identity.digest)

    def health(self) -> tuple[bool, str] | None:
        return next(((each.up, each.says) for each in self.ledger.health() if each.part == "pools"), None)


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
    s3_environment: S3, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.endpoint)
    state = Store(tmp_path, s3_environment.url())
    state.publish()
    state.mirror.follow(0.0)
    line.requests.clear()
    for now in (1.0, 5.0, LOOK_SECONDS - 1):
        state.mirror.follow(now)
    assert line.requests == []
    state.mirror.follow(LOOK_SECONDS + 1)
    assert len(line.requests) == 1


def test_while_the_store_is_away_that_is_told_and_when_it_is_back_it_catches_up(
    s3_environment: S3, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.endpoint)
    state = Store(tmp_path, s3_environment.url())
    state.publish()
    state.mirror.follow(0.0)
    line.cut()
    second = state.publish()
    state.mirror.follow(1.0)
    up, says = state.health() or (True, "")
    assert not up and "Could not connect" in says
    line.restore()
    state.mirror.follow(1.0 + RETRY_SECONDS / 2)  # too soon
    assert state.health() == (False, says)
    state.mirror.follow(1.0 + RETRY_SECONDS)
    assert state.remote.current() == second and state.health() == (True, "")


@pytest.mark.parametrize("point", [each for each in crash_points.POINTS if each.startswith("mirror.")])
def test_killed_at_any_step_the_next_life_ends_with_the_current_version_there(state: Store, point: str) -> None:
    first = state.publish()
    state.mirror.follow(0.0)
    second = state.publish()
    state.ledger.close()
    command = [sys.executable, "-c", FOLLOW, str(state.folder), state.url, str(state.cache)]
    died = subprocess.run(command, env={**os.environ, crash_points.VARIABLE: point}, check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    there = state.remote.current()
    assert there is not None and there == (second if point == "mirror.pointed" else first)
    assert state.remote.read(there), "what CURRENT names can be served, whenever it is looked at"
    again = Ledger(state.folder / "ledger.sqlite")
    PoolMirror(again, state.files.store, state.remote).follow(0.0)
    assert state.remote.current() == second and state.remote.read(second)
    again.close()


def test_another_daemons_pointer_is_left_alone_and_the_reason_is_told(state: Store, tmp_path: Path) -> None:
    theirs = state.publish()
    state.mirror.follow(0.0)
    other = Store(tmp_path / "other", state.url, mark=0.7)
    other.publish()
    other.mirror.follow(0.0)
    up, says = other.health() or (True, "")
    assert not up and f"names {theirs.folder}, which is not a version of this daemon" in says
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
    return {each.part: each.up for each in parts.ledger.health()}


def test_tasks_are_learned_and_published_while_the_store_is_away_and_it_catches_up(
    s3_environment: S3, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", line.endpoint)
    url = s3_environment.url()
    parts = daemon(config_of(tmp_path, url))
    line.cut()
    drop(tmp_path / "bucket", "sea", per_class=6)
    parts.run()
    assert parts.states == {"sea": "PUBLISHED"} and health(parts)["pools"] is False
    line.restore()
    later = time.time() + RETRY_SECONDS
    parts.orchestrator.clock = lambda: later
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
    assert mirror_for(config, ledger, StateFiles(config.state.dir)) is None
    ledger.close()
