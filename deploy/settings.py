"""What an operator may choose about serving. No heavy imports: the command line reads it."""

import hashlib
import json
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from mqmk.deploy.errors import ServeError


@dataclass(frozen=True)
class ServeSettings:
    """Where, how many, how much, and what for. Two services with equal settings are the same service."""

    pools: Path
    """The daemon's pool store, which replicas watch unless `store` is given; reports go into `replicas/` beside it."""
    store: str | None = None
    """`s3://bucket/prefix` of the pool store that replicas watch instead: they may be on any machine."""
    cache: Path | None = None
    """Where they keep what they downloaded; None is a folder among the temporary files."""
    cached: int = 3
    """So many downloaded versions are kept on a machine."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Path | None = None
    """A file with the sha256 of one API key a line; None asks for no key, which is refused beyond loopback."""
    anonymous: bool = False
    """Serve without API keys on an address that others can reach."""
    proxies: Literal["head", "every"] = "head"
    """Who receives requests: Ray's head, or every node with a replica."""

    replicas: int = 1
    max_replicas: int | None = None
    """Autoscale from `replicas` to this many; None keeps `replicas`."""
    target_requests: float = 8.0
    """Autoscaling: requests under way for each replica."""
    scale_up_seconds: float = 10.0
    scale_down_seconds: float = 300.0
    """Autoscaling: how long there must be too many or too few requests."""
    num_cpus: float = 0.5
    """What Ray reserves for a replica; small, so that trainers fit beside it."""
    num_gpus: float = 0.0
    """A fraction shares a GPU."""
    threads: int = 1
    """Threads of one forward pass."""
    decode_threads: int = 2

    backbone: str = "embedded"
    weights: str = "hub"
    weights_sha256: str | None = None
    image_size: int | None = None

    matcher: str = "auto"
    budget: float = 4.0
    """`auto` takes no matcher that costs more than this many queries an image."""
    top_k: int = 5

    max_batch: int = 32
    batch_wait_seconds: float = 0.0
    """How long a batch that is not full waits for company; 0 takes what came while the model was busy."""
    max_queue: int = 128
    """Pictures under way in one replica; beyond it the answer is 429."""
    max_pictures: int = 64
    """Pictures in one request."""
    request_bytes: int = 16 * 2**20
    pixels: int = 40_000_000
    timeout_seconds: float = 30.0

    watch_seconds: float = 0.25
    """How often a replica looks at the pointer."""
    retry_seconds: float = 5.0
    """After this long a refused pool is looked at again; its files may have been repaired."""
    remembered_answers: int = 10_000
    """How many answers of a replica can still get feedback."""

    agreement_share: float = 0.01
    """Of answers, which are matched again exactly, to tell how often both agree; less where that would cost much."""
    task_labels: int = 100
    """Tasks with metrics of their own; the others are added up as `other`."""

    proxy_health_seconds: float = 1.0
    proxy_health_timeout_seconds: float = 2.0
    haproxy: bool = False
    """Ray's bundled HAProxy in front: more requests a second. Only with a Ray head on this machine."""
    private: Path | None = None
    """A folder that only we can enter, for HAProxy's files and sockets; short, for their paths have 107 letters."""

    def __post_init__(self) -> None:
        for name in ("replicas", "threads", "decode_threads", "top_k", "max_batch", "max_queue", "max_pictures"):
            _at_least(name, getattr(self, name), 1)
        for name in ("request_bytes", "pixels", "remembered_answers", "cached"):
            _at_least(name, getattr(self, name), 1)
        for name in ("timeout_seconds", "watch_seconds", "proxy_health_seconds", "proxy_health_timeout_seconds"):
            _at_least(name, getattr(self, name), 0.01)
        if self.max_replicas is not None:
            _at_least("max_replicas", self.max_replicas, self.replicas)
        for name in ("task_labels", "scale_up_seconds", "scale_down_seconds"):
            _at_least(name, getattr(self, name), 0)
        if self.haproxy and self.private is None:
            raise ServeError("haproxy: expected `private` to name a folder for its sockets, got none")
        if not 0 <= self.agreement_share <= 1:
            raise ServeError(f"agreement_share: expected 0 to 1, got {self.agreement_share}")
        if not 0 <= self.port <= 65535:
            raise ServeError(f"port: expected 0 to 65535, got {self.port}")
        if not (is_loopback(self.host) or self.api_keys or self.anonymous):
            raise ServeError(
                f"host {self.host} can be reached by others, and no API keys are set. Name a file of keys as api_keys, "
                "or set anonymous = true to let everybody in"
            )

    @property
    def reports(self) -> Path:
        """Where replicas report what they hold."""
        return self.pools.parent / "replicas"

    @property
    def url(self) -> str:
        """Where this machine reaches the service."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def digest(self, release: str) -> str:
        """What changes when a running service must be replaced: a setting, or the release of this package."""
        fields: dict[str, Any] = asdict(self) | {"release": release}
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _at_least(name: str, value: float, least: float) -> None:
    if value < least:
        raise ServeError(f"{name}: expected at least {least}, got {value}")
