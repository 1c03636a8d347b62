"""Does everything the daemon needs work on this machine? Each check is a function from the configuration to a result.

Checks change nothing. What does not exist yet, and `mqmk-daemon start` will create, is fine.
"""

import json
import os
import queue
import shutil
import socket
import sqlite3
import tempfile
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Final
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import Request, build_opener

from mqmk.daemon.config.fields import display
from mqmk.daemon.config.sections import Config
from mqmk.daemon.errors import BucketError, DaemonError, RegistryError
from mqmk.daemon.host.file_systems import refuse_network_file_system
from mqmk.daemon.host.finding import Check, CheckResult, Finding
from mqmk.daemon.host.port_checks import ANSWER_SECONDS, metrics_port, serve_port
from mqmk.daemon.registry.mlflow_env import database_path
from mqmk.deploy.serving.api_keys import ApiKeys, read_keys
from mqmk.deploy.serving.settings import is_loopback
from mqmk.matcher.errors import MqmkError, PoolError

if TYPE_CHECKING:
    from mqmk.matcher.prompted_vit import BackboneInfo

GIGABYTE: Final = 2**30
LITTLE_DISK, TOO_LITTLE_DISK = 10 * GIGABYTE, 1 * GIGABYTE
TIMEOUT_SECONDS: Final = 120.0  # for one check: a backbone may have to be downloaded


def run_checks(
    config: Config, checks: Mapping[str, Check] | None = None, timeout: float = TIMEOUT_SECONDS
) -> Iterator[Finding]:
    """Run the checks in order; one that raises or hangs is a finding too."""
    for name, check in (CHECKS if checks is None else checks).items():
        yield Finding(name, *_run_check(check, config, timeout))


def _run_check(check: Check, config: Config, timeout: float) -> CheckResult:
    result: queue.Queue[CheckResult] = queue.Queue()

    def run() -> None:
        try:
            result.put(check(config))
        except MqmkError as error:
            result.put(("fail", str(error), ""))
        except Exception as error:
            result.put(("fail", f"{type(error).__name__}: {error}", "unexpected error; please report it"))

    threading.Thread(target=run, daemon=True).start()  # a daemon thread, so that a hanging check does not delay exit
    try:
        return result.get(timeout=timeout)
    except queue.Empty:
        return "fail", f"no answer within {timeout:g} s", "check whether a firewall drops the connection"


def versions(_config: Config) -> CheckResult:
    """Every required package is installed, in a version that is accepted."""
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
    return "ok", f"mqmk-daemon {version('mqmk-daemon')}, and all {count} required packages", ""


def devices(config: Config) -> CheckResult:
    """There are enough CPUs and GPUs for one training run beside the replicas."""
    import torch

    gpus, cpus = torch.cuda.device_count(), config.ray.num_cpus or os.cpu_count() or 1
    found = f"{gpus} GPUs, {cpus} CPUs"
    if config.ray.address != "local":
        return "ok", f"{found} in this machine", ""
    serving = config.serve.most_replicas if config.serve.enabled else 0
    wanted_gpus = config.ray.trainer_gpus * config.ray.workers_per_task + config.serve.num_gpus * serving
    wanted_cpus = config.ray.trainer_cpus * config.ray.workers_per_task + config.serve.num_cpus * serving
    if wanted_gpus > gpus:
        to_do = "lower ray.trainer_gpus, serve.num_gpus or serve.replicas, or check whether `nvidia-smi` works"
        return "fail", f"{found}, but a training run and the replicas need {wanted_gpus:g} GPUs", to_do
    if wanted_cpus > cpus:
        to_do = "lower ray.trainer_cpus, serve.num_cpus or serve.replicas"
        return "fail", f"{found}, but a training run and the replicas need {wanted_cpus:g} CPUs", to_do
    if gpus and not wanted_gpus:
        return "warn", f"{found}, but no GPU is used", "set ray.trainer_gpus=1, and serve.num_gpus for serving"
    return "ok", found, ""


def state_folder(config: Config) -> CheckResult:
    """The state directory is writable by us and by nobody else."""
    folder = config.state.dir
    refuse_network_file_system(folder)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        to_do = "set state.dir to a folder that you can write to (--state FOLDER), or change the owner of this one"
        return "fail", f"{there} is not writable: {error.strerror}", to_do
    if there != folder:
        return "ok", f"{folder} does not exist yet", ""
    if folder.stat().st_mode & 0o022:
        return (
            "warn",
            f"others can write to {folder}, and what they write would be served",
            f"chmod go-w {quote(str(folder))}",
        )
    return "ok", str(folder), ""


def disk(config: Config) -> CheckResult:
    """There is disk space for pools, training runs and records."""
    there = next(path for path in (config.state.dir, *config.state.dir.parents) if path.exists())
    free = shutil.disk_usage(there).free
    what = f"{free / GIGABYTE:.1f} GB free at {there}"
    if free >= LITTLE_DISK:
        return "ok", what, ""
    return (
        "fail" if free < TOO_LITTLE_DISK else "warn",
        what,
        "free some space, or move state.dir",
    )


def exposure(config: Config) -> CheckResult:
    """Nothing is open to the network unless it was configured so."""
    if config.serve.enabled and not is_loopback(config.serve.host) and not config.serve.api_keys:
        what = f"anybody who can reach {config.serve.host}:{config.serve.port} can request predictions"
        return "warn", what, "set serve.api_keys to a file, or put a proxy that requires a login in front"
    keys = config.serve.api_keys
    if config.serve.enabled and keys and keys.exists() and keys.stat().st_mode & 0o022:
        return "warn", f"others can write to {keys} and add API keys", f"chmod go-w {quote(str(keys))}"
    if not is_loopback(config.metrics.host):
        what = f"anybody who can reach {config.metrics.host}:{config.metrics.port} can read task names"
        return "warn", what, "set metrics.host=127.0.0.1, or restrict the port to your Prometheus"
    return "ok", "whatever listens requires API keys or listens on loopback only", ""


def api_keys(config: Config) -> CheckResult:
    """The file of API keys is readable and well formed."""
    serves = config.serve.enabled and config.ray.address != "none"
    keys = read_keys(config.serve.api_keys) if serves else ApiKeys()
    if not keys.hashes:
        return "ok", "none required", ""
    return "ok", f"{len(keys.hashes)} in {config.serve.api_keys}", ""


def bucket(config: Config) -> CheckResult:
    """The bucket can be listed."""
    url = config.bucket_url
    if "://" not in url and not Path(url).exists():
        if config.bucket.url is None:
            return "ok", f"{url} does not exist yet", ""
        return "warn", f"{url} does not exist", f"mkdir -p {quote(url)}/tasks, or correct bucket.url"
    from mqmk.daemon.bucket.scanner import Bucket

    try:
        Bucket(url, settle_seconds=config.bucket.settle_seconds).check()
    except BucketError as error:
        to_do = "correct bucket.url, or for s3:// AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return "fail", str(error), to_do
    return "ok", f"{display(url)} can be listed", ""


def pool_store(config: Config) -> CheckResult:
    """The pool store that replicas watch can be read, and every card in the local one."""
    if found := _unreadable_cards(config.pools_folder):
        return found
    if config.pools.url is None:
        return "ok", f"the folder {config.pools_folder}", ""
    from mqmk.deploy.serving.pools.s3_store import open_remote_pools

    try:
        current = open_remote_pools(config.pools.url, config.pools.cache).current()
    except PoolError as error:
        to_do = "correct pools.url, AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return "fail", str(error), to_do
    version = f"version {current.version}" if current else "no version"
    return "ok", f"{config.pools.url} can be read; {version} is current there", ""


def _unreadable_cards(pools: Path) -> CheckResult | None:
    from mqmk.matcher.pool_store import PoolStore

    store = PoolStore(pools)
    unreadable = store.unreadable_cards()
    if not unreadable:
        return None
    card, reason = next(iter(unreadable.items()))
    more = f", and {len(unreadable) - 1} more" if len(unreadable) > 1 else ""
    what = f"{card} cannot be read: {reason}{more}; until it can, layers of removed versions and tasks stay on disk"
    to_do, current = "mqmk-daemon doctor --rebuild, or restore it from a backup", store.current()
    if current is None or current.card != card.name:
        to_do += f", or give this version up: rm {quote(str(card))}"
    return "warn", what, to_do


def backbone(config: Config) -> CheckResult:
    """The frozen ViT loads and computes what timm computes; it is the one the pool was trained on; settings fit it."""
    import torch

    from mqmk.learner.settings import check_settings
    from mqmk.matcher.backbone import HUB, load_backbone

    chosen = config.backbone
    cpu = torch.device("cpu")  # a GPU context would keep its memory until this process ends
    vit = load_backbone(
        chosen.name, weights=chosen.weights or HUB, sha256=chosen.sha256, image_size=chosen.image_size, device=cpu
    )
    check_settings(config.train, vit.depth)
    info, trained_on = vit.info, _read_trained_backbone(config)
    if trained_on not in (None, info):
        what = f"{config.state.dir} was trained on {trained_on}, but the configured backbone is {info}"
        return "fail", what, "configure the backbone it was trained on, or choose another state.dir (--state FOLDER)"
    return "ok", f"{info.name}, {info.image_size} px, sha256 {info.weights_sha256[:12]}", ""


def _read_trained_backbone(config: Config) -> "BackboneInfo | None":
    """The backbone of the current version; None before the first one, or if it cannot be read."""
    from mqmk.matcher.pool_store import current_backbone

    try:
        return current_backbone(config.pools_folder)
    except (PoolError, OSError):
        return None


def ray(config: Config) -> CheckResult:
    """Ray answers, or is not running yet."""
    if config.ray.address == "none":
        return "ok", "not used: tasks are trained in the daemon, nothing is served", ""
    if config.ray.address != "local":
        return _check_reachable(
            config.ray.address, 10001, "check whether the cluster is running, or correct ray.address"
        )
    if not config.ray_head_file.exists():
        return "ok", "not running; `mqmk-daemon start` starts it", ""
    to_do = f"mqmk-daemon stop, then start; if that does not help, remove {config.ray_head_file}"
    try:
        address = str(json.loads(config.ray_head_file.read_text())["address"])
    except (ValueError, KeyError, TypeError):
        return "fail", f"{config.ray_head_file} cannot be parsed", to_do
    return _check_reachable(address, 6379, to_do)


def mlflow(config: Config) -> CheckResult:
    """MLflow's tracking store can be reached."""
    uri, shown_uri = config.tracking_uri, display(config.tracking_uri)
    if not config.mlflow.enabled:
        return "ok", "disabled (mlflow.enabled)", ""
    try:
        file = database_path(uri)
    except RegistryError as error:
        return "fail", f"{shown_uri} is not a tracking URI that can be used", str(error)
    if file is not None:
        return _sqlite(file)
    try:
        with build_opener().open(_health_of(uri), timeout=ANSWER_SECONDS):
            return "ok", f"{shown_uri} answers", ""
    except HTTPError as error:
        to_do = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or correct mlflow.tracking_uri"
        return "fail", f"{shown_uri} answers {error.code} {error.reason}", to_do
    except (URLError, OSError) as error:
        to_do = "start the tracking server, or correct mlflow.tracking_uri; until then nothing is recorded"
        return "fail", f"{shown_uri} does not answer: {getattr(error, 'reason', error)}", to_do


CHECKS: Final[Mapping[str, Check]] = {
    "versions": versions,
    "devices": devices,
    "state folder": state_folder,
    "disk": disk,
    "serve port": serve_port,
    "metrics port": metrics_port,
    "exposure": exposure,
    "API keys": api_keys,
    "bucket": bucket,
    "pool store": pool_store,
    "backbone": backbone,
    "ray": ray,
    "mlflow": mlflow,
}


def _health_of(server: str) -> Request:
    """The health request to a tracking server; urllib would take a login in the URL for part of the host name."""
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
    except ValueError:  # its text holds what was taken for the port, which may be part of a password
        reason = f"expected HOST:PORT, or a URL with %2F for a slash in its password, got {display(address)}"
        raise DaemonError(reason) from None
    return parts


def _check_reachable(address: str, usual_port: int, to_do: str) -> CheckResult:
    parts = _parts(address)
    host, port = parts.hostname or "", parts.port or usual_port
    try:
        with socket.create_connection((host, port), timeout=ANSWER_SECONDS):
            return "ok", f"{host}:{port} answers", ""
    except OSError as error:
        return "fail", f"{host}:{port} does not answer: {error.strerror or error}", to_do


def _sqlite(file: Path) -> CheckResult:
    if not file.exists():
        return "ok", f"{file} does not exist yet", ""
    try:
        connection = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        return "fail", f"{file}: {error}", "restore the file from a backup"
    return "ok", str(file), ""
