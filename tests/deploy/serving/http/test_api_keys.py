"""Keys in a file that changes under a running service, and the command that changes it."""

import json
import logging
import os
import stat
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.serving.service_specs import changed, spec_of

from mqmk.daemon.cli.main import cli
from mqmk.deploy.serving.api_key_file import add_key, list_keys, revoke_key
from mqmk.deploy.serving.api_keys import CHECK_SECONDS, ApiKeys, KeyFile, hash_key, open_keys
from mqmk.deploy.serving.errors import ServeError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_on(self) -> None:
        self.now += CHECK_SECONDS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text(f"{hash_key('old')}\n")
    return tmp_path / "keys"


def put(file: Path, text: str) -> None:
    """As an editor or a mounted secret does: a new file in its place."""
    part = file.with_name("part")
    part.write_text(text)
    part.replace(file)


def test_a_changed_file_counts_within_a_second_and_is_not_looked_at_more_often(file):
    clock = Clock()
    keys = KeyFile(file, clock)
    put(file, f"{hash_key('new')}\n")
    assert keys.accept("old") and not keys.accept("new")
    clock.pass_on()
    assert keys.accept("new") and not keys.accept("old")


@pytest.mark.parametrize("modified", ["long ago", "at the same time"])
def test_a_file_that_is_written_in_place_counts_too(file, modified):
    clock, before = Clock(), file.stat()
    keys = KeyFile(file, clock)
    time.sleep(0.02)  # the kernel's clock ticks every few milliseconds
    file.write_text(f"{hash_key('new')}\n")
    os.utime(file, ns=(1, 1) if modified == "long ago" else (before.st_mtime_ns, before.st_mtime_ns))
    clock.pass_on()
    assert keys.accept("new") and not keys.accept("old")


@pytest.mark.parametrize("text", ["", "secret\n", None], ids=["empty", "malformed", "missing"])
def test_of_a_bad_file_the_old_keys_stay_and_the_log_says_why_once(file, text, caplog):
    clock = Clock()
    keys = KeyFile(file, clock)
    file.unlink() if text is None else put(file, text)
    for _ in range(3):
        clock.pass_on()
        assert keys.accept("old") and not keys.accept("secret")
    assert caplog.text.count("keeping the previous keys") == 1
    caplog.set_level(logging.INFO)
    put(file, f"{hash_key('new')}\n")
    clock.pass_on()
    assert keys.accept("new") and not keys.accept("old")
    assert "1 API keys" in caplog.text and "secret" not in caplog.text


def test_without_a_file_everybody_gets_in_and_a_bad_one_is_refused_at_once(tmp_path):
    assert open_keys(None) == ApiKeys()
    with pytest.raises(ServeError, match=r"cannot be read.*api-key new"):
        open_keys(tmp_path / "absent")


def test_a_service_with_other_keys_is_another_service(file, tmp_path):
    one = spec_of(tmp_path, api_keys=file)
    before = one.digest("1")
    put(file, f"# a comment\n{hash_key('old')}  shop\n")
    assert one.digest("1") == before
    put(file, f"{hash_key('new')}\n")
    assert one.digest("1") != before
    with pytest.raises(ServeError, match="cannot be read"):
        changed(one, api_keys=tmp_path / "absent").digest("1")


def test_a_key_is_made_listed_and_revoked(tmp_path):
    path = tmp_path / "keys"
    shop, lab = add_key(path, "shop"), add_key(path, "lab")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert shop not in path.read_text() and lab not in path.read_text()
    assert [(entry.name, entry.hash) for entry in list_keys(path)] == [("shop", hash_key(shop)), ("lab", hash_key(lab))]
    assert revoke_key(path, "shop").hash == hash_key(shop)
    keys = KeyFile(path)
    assert keys.accept(lab) and not keys.accept(shop)


def test_lines_of_other_tools_and_comments_are_kept_and_can_be_revoked_by_their_hash(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# of the shop\n{hash_key('a')}  -\n\n{hash_key('b')}\n")
    path.chmod(0o644)
    add_key(path, "lab")
    revoke_key(path, hash_key("a")[:8].upper())
    assert [entry.name for entry in list_keys(path)] == ["-", "lab"]
    assert path.read_text().startswith("# of the shop\n") and stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda path: add_key(path, "shop"), "there is a key named shop"),
        (lambda path: add_key(path, "a b"), "expected a name"),
        (lambda path: revoke_key(path, "nobody"), "no key is named"),
        (lambda path: revoke_key(path, "-"), "no key is named"),
        (lambda path: revoke_key(path, hash_key("shop")[:7]), "no key is named"),
        (lambda path: revoke_key(path, "shop"), "the only key"),
    ],
    ids=["twice", "no name", "unknown", "a dash", "too short", "the last one"],
)
def test_what_cannot_be_done_changes_nothing(tmp_path, act, says):
    path = tmp_path / "keys"
    path.write_text(f"{hash_key('shop')}  shop  2026-01-01\n")
    with pytest.raises(ServeError, match=says):
        act(path)
    assert path.read_text() == f"{hash_key('shop')}  shop  2026-01-01\n"


def run(*words: str) -> str:
    found = CliRunner().invoke(cli, ["api-key", *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_command_prints_the_key_alone_so_that_a_shell_can_keep_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mqmk.yaml").write_text("serve: {api_keys: keys}\n")
    key = run("new", "shop").strip()
    assert KeyFile(tmp_path / "keys").accept(key)
    lab = json.loads(run("new", "lab", "--json"))
    assert KeyFile(tmp_path / "keys").accept(lab["key"]) and lab["name"] == "lab"
    assert run("list").splitlines()[1].split() == ["shop", list_keys(tmp_path / "keys")[0].created, hash_key(key)[:12]]
    assert json.loads(run("list", "--json"))["keys"][1]["hash"] == hash_key(lab["key"])
    assert "Revoked shop" in run("revoke", "shop", "--file", "keys")
    assert json.loads(run("list", "--json"))["keys"][0]["name"] == "lab"


def test_the_command_asks_for_a_file_where_none_is_configured(tmp_path, monkeypatch):
    from mqmk.daemon.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--file FILE"):
        run("new", "shop")
