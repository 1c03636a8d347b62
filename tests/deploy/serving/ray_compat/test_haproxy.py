"""Ray's bundled HAProxy: kept to our address and our folder, and it answers."""

import json
import urllib.request
from pathlib import Path

import pytest
from support.exposure import beyond_loopback, listening_addresses, ports_of, process_tree
from support.serving.answers import version_of
from support.serving.fingerprints import image_bytes, marked_pool, publish
from support.serving.running_service import running_service, until

from mqmk.deploy.serving.errors import ServeError
from mqmk.deploy.serving.ray_compat.haproxy import restrict_ports
from mqmk.matcher.backbone import load_backbone

WRITTEN = """global
    stats socket {folder}/a mode 666 level admin expose-fd listeners
defaults
    mode http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind {host}:8000
    acl healthcheck path -i /-/healthz
listen stats
  bind *:8404
  stats enable
"""


def kept(host: str, written: str = WRITTEN) -> list[str]:
    text = restrict_ports(written.format(host=host, folder="/private"), host, Path("/private"))
    return [line.strip() for line in text.splitlines() if line.strip().startswith("bind")]


def test_statistics_move_from_ports_to_sockets_and_nothing_else_changes():
    before = WRITTEN.format(host="127.0.0.1", folder="/private")
    after = restrict_ports(before, "127.0.0.1", Path("/private"))
    assert kept("127.0.0.1") == [
        "bind unix@/private/p mode 600",
        "bind 127.0.0.1:8000",
        "bind unix@/private/s mode 600",
    ]
    assert [one for one in before.splitlines() if "bind" not in one] == [
        one for one in after.splitlines() if "bind" not in one
    ]


def test_an_address_that_was_asked_for_stays_open():
    text = restrict_ports(WRITTEN.format(host="*", folder="/p"), "0.0.0.0", Path("/p"))
    assert "bind *:8000" in text
    assert "8404" not in text


@pytest.mark.parametrize("line", ["bind :9999", "bind *:9999", "bind 0.0.0.0:9999", "bind [::]:9999"])
def test_a_port_that_nobody_expected_stops_haproxy(line):
    with pytest.raises(ServeError, match="would listen at"):
        kept("127.0.0.1", WRITTEN + f"frontend another\n    {line}\n")


def test_it_answers_listens_on_loopback_only_and_leaves_its_files_in_our_folder(tmp_path):
    before = set(Path("/tmp").glob("haproxy*"))
    publish(tmp_path / "pools", marked_pool(load_backbone(), 1), 1)
    with running_service(tmp_path / "pools", replicas=1, haproxy=True) as running:
        for sent in ({"X-Request-Id": "mine"}, {}):
            request = urllib.request.Request(f"{running.url}/predict", image_bytes(), sent)
            with urllib.request.urlopen(request, timeout=30) as answer:
                body = json.load(answer)
                assert version_of(body) == 1
                assert answer.headers.get_all("X-Request-Id") == [body["id"]]
        assert running.post("/predict", image_bytes(), **{"X-Request-Id": "mine"})["id"] == "mine"
        assert running.post("/predict", b"hello")["status"] == 415
        found = listening_addresses(process_tree(running.process.pid))
        port = int(running.url.rpartition(":")[2])
        owners = [owner for address, owner in found.items() if port in ports_of({address: owner})]
        assert owners and all("haproxy" in owner for owner in owners)  # HAProxy, not Serve's own proxy
        assert beyond_loopback(found) == {}
        assert list(running.temp.glob("*/haproxy.cfg"))
        assert set(Path("/tmp").glob("haproxy*")) == before
        haproxies = [pid for pid in process_tree(running.process.pid) if _is_haproxy(pid)]
        assert haproxies
    until(lambda: not any(_is_haproxy(pid) for pid in haproxies), 30, "HAProxy ends with its service")


def _is_haproxy(pid: int) -> bool:
    try:
        return "haproxy" in (Path("/proc") / str(pid) / "exe").readlink().name
    except OSError:
        return False
