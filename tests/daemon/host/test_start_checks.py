"""What `start` and `doctor` refuse before anything runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from mqmk.daemon.app import run_daemon
from mqmk.daemon.config.sections import Config, Ray, State
from mqmk.daemon.errors import DaemonError
from mqmk.daemon.host import doctor, file_systems
from mqmk.daemon.host.file_systems import file_system
from mqmk.deploy.serving.api_keys import hash_key
from mqmk.deploy.serving.settings import ServeSettings

TABLE = """\
22 28 0:21 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:5 / /srv rw - nfs4 server:/srv rw,vers=4.2
31 30 0:6 / /srv/local rw - xfs /dev/vdb rw
32 22 0:7 / /mnt/my\\040share rw master:1 - fuse.sshfs me@there: rw
33 22 0:8 / /data rw - ceph mon:/ rw
34 33 0:9 / /data rw - ext4 /dev/vdc rw
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    (tmp_path / "mountinfo").write_text(TABLE)
    return tmp_path / "mountinfo"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/mqmk", "ext4"),
        ("/srv/mqmk/state", "nfs4"),
        ("/srv", "nfs4"),
        ("/srvx", "ext4"),
        ("/srv/local/mqmk", "xfs"),
        ("/mnt/my share/mqmk", "fuse.sshfs"),
        ("/data/mqmk", "ext4"),
    ],
)
def test_the_nearest_mount_says_the_file_system(mounts, path, kind):
    assert file_system(Path(path), mounts) == kind


@pytest.mark.parametrize("path", ["/srv/mqmk", "/mnt/my share"])
def test_network_file_systems_are_refused_be_they_of_the_kernel_or_of_a_program(mounts, path):
    with pytest.raises(DaemonError, match="network file system"):
        file_systems.refuse_network_file_system(Path(path), mounts)
    file_systems.refuse_network_file_system(Path("/srv/local"), mounts)


def test_without_a_table_nothing_is_known_and_this_machine_has_one(tmp_path):
    assert file_system(tmp_path, tmp_path / "absent") is None
    assert file_system(tmp_path) not in {None, *file_systems.NETWORK}


@pytest.fixture
def on_nfs(tmp_path: Path, monkeypatch) -> Config:
    table = f"22 28 0:21 / / rw - ext4 /dev/vda1 rw\n30 22 0:5 / {tmp_path} rw - nfs server:/srv rw\n"
    (tmp_path / "mountinfo").write_text(table)
    checked = file_systems.refuse_network_file_system
    monkeypatch.setattr(
        "mqmk.daemon.host.doctor.refuse_network_file_system", lambda folder: checked(folder, tmp_path / "mountinfo")
    )
    return replace(Config(), state=State(tmp_path / "state"))


def test_a_state_folder_on_a_network_file_system_is_refused_before_anything_is_made(on_nfs):
    with pytest.raises(DaemonError, match=r"network file system \(nfs\).*state\.dir to a local disk.*pools\.url"):
        run_daemon(on_nfs)
    assert not on_nfs.state.dir.exists()
    (finding,) = doctor.run_checks(on_nfs, {"state folder": doctor.state_folder})
    assert finding.status == "fail" and "(nfs)" in finding.what


@pytest.mark.parametrize("text", ["secret\n", "", None], ids=["malformed", "empty", "missing"])
def test_a_bad_file_of_api_keys_is_refused_before_anything_is_made(tmp_path, text):
    keys = tmp_path / "keys"
    if text is not None:
        keys.write_text(text)
    config = replace(Config(), state=State(tmp_path / "state"), serve=ServeSettings(api_keys=keys))
    with pytest.raises(DaemonError, match="api-key new"):
        run_daemon(config)
    assert not config.state.dir.exists()
    (finding,) = doctor.run_checks(config, {"API keys": doctor.CHECKS["API keys"]})
    assert finding.status == "fail" and str(keys) in finding.what


def test_a_good_file_of_api_keys_is_counted_and_one_that_nobody_reads_may_be_missing(tmp_path):
    (tmp_path / "keys").write_text(f"{hash_key('a')}\n{hash_key('b')}  shop\n")
    config = replace(Config(), serve=ServeSettings(api_keys=tmp_path / "keys"))
    assert doctor.api_keys(config) == ("ok", f"2 in {tmp_path / 'keys'}", "")
    assert doctor.api_keys(Config())[:2] == ("ok", "none required")
    unread = replace(config, serve=ServeSettings(api_keys=tmp_path / "absent"), ray=Ray(address="none"))
    assert doctor.api_keys(unread)[0] == "ok"
