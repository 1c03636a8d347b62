"""Settings of the service: what an operator may choose, and what the daemon adds. Cheap to import: the CLI does."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from mqmk.deploy.serving.api_keys import read_keys
from mqmk.deploy.serving.errors import ServeError
from mqmk.deploy.serving.ranges import Count, Port, Range, Resource, Seconds
from mqmk.matcher.matcher_info import AUTO, SERVABLE_MATCHERS

if TYPE_CHECKING:
    MatcherName = str
    ServedMatcher = str
else:
    MatcherName = Literal[SERVABLE_MATCHERS]
    ServedMatcher = Literal[(AUTO, *SERVABLE_MATCHERS)]
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that mean every interface, and where this machine reaches a server that listens there."""


@dataclass(frozen=True)
class ServeSettings:
    """Answering over HTTP."""

    enabled: bool = True
    """Serve predictions."""
    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs `serve.api_keys` or `serve.open`."""
    port: Port = 8000
    """Port of the HTTP API and the page."""
    replicas: Count = 1
    """Replicas of the model; with `serve.max_replicas`, the minimum."""
    max_replicas: Count | None = None
    """Scale up to this many replicas under load; none keeps `serve.replicas`."""
    target_requests: Annotated[float, Range(0.1)] = 8.0
    """Requests in flight per replica, above which another one is started."""
    scale_up_seconds: Seconds = 10.0
    """How long the load must stay too high before a replica is added."""
    scale_down_seconds: Seconds = 300.0
    """How long the load must stay low before a replica is removed."""
    num_cpus: Resource = 0.5
    """CPUs that one replica reserves."""
    num_gpus: Resource = 0.0
    """GPUs that one replica reserves; may be a fraction."""
    matcher: ServedMatcher = AUTO
    """Matcher of a request that names none; `auto` takes the best measured one within `serve.budget`."""
    budget: Annotated[float, Range(1)] = 4.0
    """Queries an image may cost on average when the matcher is `auto`."""
    max_batch: Count = 32
    """Largest batch of images."""
    batch_wait_seconds: Seconds = 0.0
    """How long a batch that is not full waits for more images; 0 takes what arrived while the model was busy."""
    max_queue: Count = 256
    """Images in flight in one replica; beyond it requests are rejected (429)."""
    request_bytes: Annotated[int, Range(1024)] = 16 * 2**20
    """Largest request (413)."""
    timeout_seconds: Annotated[float, Range(0.1)] = 30.0
    """Longest time for one request."""
    watch_seconds: Annotated[float, Range(0.01)] = 0.25
    """How often a replica polls the pointer for a new version."""
    fallback: Literal["none", "previous"] = "none"
    """A new replica that finds the current version damaged waits, or serves its newest intact ancestor."""
    agreement_share: Annotated[float, Range(0, 1)] = 0.01
    """Share of the answers that are compared with exact matching in the background."""
    api_keys: Path | None = None
    """File with the hashes of the accepted API keys, one per line; none requires no key."""
    open: bool = False
    """Serve without API keys on an address that is not loopback."""
    proxies: Literal["head", "every"] = "head"
    """Who receives requests: Ray's head, or every node with a replica. Read when Ray Serve is started."""
    haproxy: bool = False
    """Use Ray's bundled HAProxy as the proxy of the local Ray: more requests per second. Takes effect after `stop`."""

    @property
    def most_replicas(self) -> int:
        """How many replicas must fit."""
        return self.max_replicas or self.replicas

    @property
    def needs_api_keys(self) -> bool:
        """Whether others can reach the address, and neither keys nor `open` are set."""
        return not (is_loopback(self.host) or self.api_keys or self.open)

    @property
    def listens_everywhere(self) -> bool:
        """Whether the address means every interface."""
        return self.host in _WILDCARDS

    @property
    def local_address(self) -> tuple[str, int]:
        """Host and port at which this machine reaches the service."""
        return _WILDCARDS.get(self.host, self.host), self.port

    @property
    def url(self) -> str:
        """Where this machine reaches the service."""
        host, port = self.local_address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True)
class ServiceSpec:
    """Everything a service is started with. Two services with equal specs are the same service."""

    pools: Path
    """The daemon's pool store, which replicas watch unless `store` is given. Their status goes to `../replicas`."""
    serve: ServeSettings = ServeSettings()

    store: str | None = None
    """`s3://bucket/prefix` of the pool store that replicas watch instead: they may be on any machine."""
    store_watch_seconds: Annotated[float, Range(0.01)] = 1.0
    """How often a replica polls the pointer in `store`; the folder's, `serve.watch_seconds`."""
    cache: Path | None = None
    """Where replicas keep downloaded versions; None is a folder among the temporary files."""
    cached: Count = 3
    """Downloaded versions to keep on a machine."""

    backbone: str = "embedded"
    weights: str = "hub"
    weights_sha256: str | None = None
    image_size: int | None = None

    threads: Count = 1
    """Threads of one forward pass."""
    decode_threads: Count = 2
    top_k: Count = 5
    """Classes in an answer to a request that does not say."""
    max_images: Count = 64
    """Images in one request."""
    pixels: Count = 40_000_000
    formats: tuple[str, ...] = ()
    """Image formats that are accepted besides JPEG, PNG and WebP."""
    remembered_answers: Count = 10_000
    """How many of its latest answers a replica accepts feedback for."""
    task_labels: Annotated[int, Range(0)] = 100
    """Tasks with their own metric series; the rest are summed as `other`."""
    retry_seconds: Seconds = 5.0
    """How long after a rejection a pool is tried again; its files may have been repaired."""

    proxy_health_seconds: Annotated[float, Range(0.01)] = 1.0
    proxy_health_timeout_seconds: Annotated[float, Range(0.01)] = 2.0
    private: Path | None = None
    """A private folder for HAProxy's files and sockets; short, because socket paths have at most 107 characters."""

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_ranges(self.serve)
        if self.serve.most_replicas < self.serve.replicas:
            raise ServeError(f"max_replicas: expected at least {self.serve.replicas}, got {self.serve.max_replicas}")
        if self.serve.haproxy and self.private is None:
            raise ServeError("haproxy: expected `private` to name a folder for its sockets, got none")
        if self.serve.needs_api_keys:
            raise ServeError(
                f"host {self.serve.host} is reachable from other machines, and no API keys are set. Set "
                "serve.api_keys to a file of keys, or serve.open=true to serve without"
            )

    @property
    def replicas_folder(self) -> Path:
        """Where each replica writes its status."""
        return self.pools.parent / "replicas"

    @property
    def watch_seconds(self) -> float:
        """How often a replica polls the pointer that it follows."""
        return self.store_watch_seconds if self.store else self.serve.watch_seconds

    def digest(self, release: str) -> str:
        """What changes when a running service must be replaced: a setting, an API key, or the release of this package.

        ServeError where the file of API keys is missing or malformed: no replica could start with it.
        """
        fields: dict[str, Any] = asdict(self) | {"release": release, "keys": read_keys(self.serve.api_keys).digest}
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_ranges(settings: object) -> None:
    kind: Any = type(settings)
    for name, accepted in _ranges(kind).items():
        value = getattr(settings, name)
        if value is not None and value not in accepted:
            raise ServeError(f"{name}: expected {accepted}, got {value}")


@cache
def _ranges(kind: Any) -> dict[str, Range]:
    """The ranges of a settings class's fields; that of an optional one stands around or inside the union."""
    ranges = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Annotated:
                ranges[name] = next(extra for extra in get_args(part) if isinstance(extra, Range))
    return ranges
