"""Does everything that the daemon needs work here? Each check is a function from the configuration to a Finding.

Nothing is changed: what is not there yet, and that `mqmk-daemon start` will make, is fine.
"""

import errno
import json
import os
import queue
import shutil
import socket
import sqlite3
import tempfile
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from mqmk.daemon.config import LOOPBACK, Config
from mqmk.daemon.config_keys import shown
from mqmk.daemon.errors import BucketError, DaemonError, RegistryError
from mqmk.daemon.registry_opening import database_path
from mqmk.matcher.errors import MqmkError, PoolError

GIGABYTE: Final = 2**30
LITTLE_DISK, TOO_LITTLE_DISK = 10 * GIGABYTE, 1 * GIGABYTE
PATIENCE: Final = 120.0  # seconds for one check: a backbone may have to be downloaded
ANSWER_SECONDS: Final = 5.0  # for one connection

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it."""

    name: str
    status: Status
    what: str
    to_do: str = ""


Verdict = tuple[Status, str, str]
Check = Callable[[Config], Verdict]


def examine(config: Config, checks: Mapping[str, Check] | None = None, patience: float = PATIENCE) -> Iterator[Finding]:
    """Run the checks one after the other; one that breaks or never ends is a finding too."""
    for name, check in (CHECKS if checks is None else checks).items():
        yield Finding(name, *_verdict(check, config, patience))


def _verdict(check: Check, config: Config, patience: float) -> Verdict:
    answer: queue.Queue[Verdict] = queue.Queue()

    def run() -> None:
        try:
            answer.put(check(config))
        except MqmkError as error:
            answer.put(("fail", str(error), ""))
        except Exception as error:
            answer.put(("fail", f"{type(error).__name__}: {error}", "this was not foreseen; please report it"))

    threading.Thread(target=run, daemon=True).start()  # a daemon thread, so that a hanging one does not hold the exit
    try:
        return answer.get(timeout=patience)
    except queue.Empty:
        return "fail", f"no answer within {patience:g} s", "look whether something in between drops the connection"


def versions(_config: Config) -> Verdict:
    """Every package that the project asks for, in a version that it accepts."""
    from importlib.metadata import PackageNotFoundError, requires, version

    from packaging.requirements import Requirement

    wrong, count = [], 0
    for wanted in map(Requirement, requires("mqmk-daemon") or []):
        if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
            continue
        count += 1
        try:
            if not wanted.specifier.contains(version(wanted.name), prereleases=True):
                wrong.append(f"{wanted.name} {version(wanted.name)} is not {wanted.specifier}")
        except PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing")
    if wrong:
        return "fail", "; ".join(wrong), "pip install --upgrade mqmk-daemon"
    return "ok", f"mqmk-daemon {version('mqmk-daemon')}, and all {count} packages it asks for", ""


def devices(config: Config) -> Verdict:
    """Enough CPUs and GPUs for one training beside the replicas."""
    import torch

    gpus, cpus = torch.cuda.device_count(), config.ray.num_cpus or os.cpu_count() or 1
    found = f"{gpus} GPUs, {cpus} CPUs"
    if config.ray.address != "local":
        return "ok", f"{found} in this machine", ""
    serving = config.serve.most_replicas if config.serve.enabled else 0
    wanted_gpus = config.ray.trainer_gpus * config.ray.workers_per_task + config.serve.num_gpus * serving
    wanted_cpus = config.ray.trainer_cpus * config.ray.workers_per_task + config.serve.num_cpus * serving
    if wanted_gpus > gpus:
        to_do = "lower ray.trainer_gpus, serve.num_gpus or serve.replicas, or see whether `nvidia-smi` works"
        return "fail", f"{found}, but a training and the replicas want {wanted_gpus:g} GPUs", to_do
    if wanted_cpus > cpus:
        to_do = "lower ray.trainer_cpus, serve.num_cpus or serve.replicas"
        return "fail", f"{found}, but a training and the replicas want {wanted_cpus:g} CPUs", to_do
    if gpus and not wanted_gpus:
        return "warn", f"{found}, but no GPU is used", "set ray.trainer_gpus=1, and serve.num_gpus for serving"
    return "ok", found, ""


def state_folder(config: Config) -> Verdict:
    """The state folder can be written by us, and by nobody else."""
    folder = config.state.dir
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        to_do = "set state.dir to a folder that you may write (--state FOLDER), or change the owner of this one"
        return "fail", f"{there} cannot be written: {error.strerror}", to_do
    if there != folder:
        return "ok", f"{folder} is not there yet", ""
    if folder.stat().st_mode & 0o022:
        return "warn", f"others may write into {folder}, and what they write would be served", f"chmod go-w {folder}"
    return "ok", str(folder), ""


def disk(config: Config) -> Verdict:
    """Room for pools, work and records."""
    there = next(path for path in (config.state.dir, *config.state.dir.parents) if path.exists())
    free = shutil.disk_usage(there).free
    what = f"{free / GIGABYTE:.1f} GB free at {there}"
    if free >= LITTLE_DISK:
        return "ok", what, ""
    return "fail" if free < TOO_LITTLE_DISK else "warn", what, "make room, or move the state folder (state.dir)"


def serve_port(config: Config) -> Verdict:
    """The port of the HTTP API is free or ours."""
    if not config.serve.enabled or config.ray.address == "none":
        return "ok", "serving is off", ""
    # a page that is shown without an API key
    return _port("serve", config.serve.host, config.serve.port, "/openapi.json", b'"mqmk-daemon"')


def metrics_port(config: Config) -> Verdict:
    """The port of the metrics is free or ours."""
    return _port("metrics", config.metrics.host, config.metrics.port, "/metrics", b"mqmk_")


def exposure(config: Config) -> Verdict:
    """Nothing is open to the network unless somebody chose so."""
    if config.serve.enabled and config.serve.host not in LOOPBACK and not config.serve.api_keys:
        what = f"everybody who can reach {config.serve.host}:{config.serve.port} may ask for predictions"
        return "warn", what, "give serve.api_keys a file, or put a proxy that asks for a login in front"
    keys = config.serve.api_keys
    if config.serve.enabled and keys and keys.exists() and keys.stat().st_mode & 0o022:
        return "warn", f"others may write {keys}, and add keys of their own", f"chmod go-w {keys}"
    if config.metrics.host not in LOOPBACK:
        what = f"everybody who can reach {config.metrics.host}:{config.metrics.port} may read task names"
        return "warn", what, "set metrics.host=127.0.0.1, or restrict the port to your Prometheus"
    return "ok", "what listens asks for keys, or listens on loopback only", ""


def bucket(config: Config) -> Verdict:
    """The bucket can be listed."""
    url = config.bucket_url
    if "://" not in url and not Path(url).exists():
        if config.bucket.url is None:
            return "ok", f"{url} is not there yet", ""
        return "warn", f"there is no folder {url}", f"mkdir -p {url}/tasks, or correct bucket.url"
    from mqmk.daemon.bucket import Bucket

    try:
        Bucket(url, settle_seconds=config.bucket.settle_seconds).check()
    except BucketError as error:
        to_do = "correct bucket.url, or for s3:// AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return "fail", str(error), to_do
    return "ok", f"{shown(url)} can be listed", ""


def pool_store(config: Config) -> Verdict:
    """The place where replicas find versions can be read."""
    if config.pools.url is None:
        return "ok", f"the folder {config.pools_folder}", ""
    from mqmk.deploy.remote_pools import open_remote_pools

    try:
        current = open_remote_pools(config.pools.url, config.pools.cache).current()
    except PoolError as error:
        to_do = "correct pools.url, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return "fail", str(error), to_do
    version = f"version {current.version}" if current else "no version"
    return "ok", f"{config.pools.url} can be read; {version} is current there", ""


def backbone(config: Config) -> Verdict:
    """The frozen ViT loads and computes what timm computes."""
    from mqmk.matcher.backbone import HUB, load_backbone

    chosen = config.backbone
    info = load_backbone(
        chosen.name, weights=chosen.weights or HUB, sha256=chosen.sha256, image_size=chosen.image_size
    ).info
    return "ok", f"{info.name}, {info.image_size} px, sha256 {info.weights_sha256[:12]}", ""


def ray(config: Config) -> Verdict:
    """Ray answers, or is not running yet."""
    if config.ray.address == "none":
        return "ok", "not used: tasks are trained in the daemon, and nothing is served", ""
    if config.ray.address != "local":
        return _reachable(config.ray.address, 10001, "look whether the cluster runs, or correct ray.address")
    if not config.ray_head_file.exists():
        return "ok", "not running; `mqmk-daemon start` starts it", ""
    to_do = f"mqmk-daemon stop, then start; if that does not help, remove {config.ray_head_file}"
    try:
        address = str(json.loads(config.ray_head_file.read_text())["address"])
    except (ValueError, KeyError, TypeError):
        return "fail", f"{config.ray_head_file} cannot be understood", to_do
    return _reachable(address, 6379, to_do)


def mlflow(config: Config) -> Verdict:
    """MLflow's store can be reached."""
    uri, shown_uri = config.tracking_uri, shown(config.tracking_uri)
    if not config.mlflow.enabled:
        return "ok", "no records are kept", ""
    try:
        file = database_path(uri)
    except RegistryError as error:
        return "fail", f"{shown_uri} is no tracking URI that can be used", str(error)
    if file is not None:
        return _sqlite(file)
    try:
        with build_opener().open(_health_of(uri), timeout=ANSWER_SECONDS):
            return "ok", f"{shown_uri} answers", ""
    except HTTPError as error:
        to_do = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or correct mlflow.tracking_uri"
        return "fail", f"{shown_uri} answers {error.code} {error.reason}", to_do
    except (URLError, OSError) as error:
        to_do = "start the tracking server, or correct mlflow.tracking_uri; until then records wait"
        return "fail", f"{shown_uri} does not answer: {getattr(error, 'reason', error)}", to_do


CHECKS: Final[Mapping[str, Check]] = {
    "versions": versions,
    "devices": devices,
    "state folder": state_folder,
    "disk": disk,
    "serve port": serve_port,
    "metrics port": metrics_port,
    "exposure": exposure,
    "bucket": bucket,
    "pool store": pool_store,
    "backbone": backbone,
    "ray": ray,
    "mlflow": mlflow,
}


def _port(section: str, host: str, port: int, path: str, mark: bytes) -> Verdict:
    if port == 0:
        return "ok", "any free port will do", ""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
        return "ok", f"{host}:{port} is free", ""
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            to_do = f"choose another {section}.host or {section}.port"
            return "fail", f"{host}:{port} cannot be listened at: {error.strerror}", to_do
    if mark in _answer(host, port, path):
        return "ok", f"{host}:{port} is ours", ""
    to_do = f"choose another one (--set {section}.port=...), or see who it is: ss -ltnp 'sport = :{port}'"
    return "fail", f"another program listens at {host}:{port}", to_do


def _answer(host: str, port: int, path: str) -> bytes:
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    try:
        with build_opener(ProxyHandler({})).open(f"http://{here}:{port}{path}", timeout=ANSWER_SECONDS) as reply:
            return bytes(reply.read(2**20))
    except (OSError, ValueError):  # HTTPError and URLError are OSErrors
        return b""


def _health_of(server: str) -> Request:
    """The question to a tracking server; urllib takes a login in the URL for a part of the host's name."""
    parts = _parts(server)
    place = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=f"{parts.path.rstrip('/')}/health")
    request = Request(place.geturl())
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request.add_header("Authorization", f"Basic {b64encode(login.encode()).decode()}")
    return request


def _parts(address: str) -> SplitResult:
    """Of a URL, or of HOST:PORT."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        _ = parts.port
    except ValueError:  # whose text holds what was taken for the port: it may be a part of a password
        reason = f"expected HOST:PORT, or a URL with %2F for a slash in its password, got {shown(address)}"
        raise DaemonError(reason) from None
    return parts


def _reachable(address: str, usual_port: int, to_do: str) -> Verdict:
    parts = _parts(address)
    host, port = parts.hostname or "", parts.port or usual_port
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS):
            return "ok", f"{host}:{port} answers", ""
    except OSError as error:
        return "fail", f"{host}:{port} does not answer: {error.strerror or error}", to_do


def _sqlite(file: Path) -> Verdict:
    if not file.exists():
        return "ok", f"{file} is not there yet", ""
    try:
        connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        return "fail", f"{file}: {error}", "bring back a copy of the file from a backup"
    return "ok", str(file), ""
