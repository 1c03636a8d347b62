"""What an operator may choose: one frozen Config of frozen sections, and the places that follow from it.

No heavy imports: every command reads it. The line under a field is its description in `mqmk-daemon config` and in
docs/configuration.md. Where values come from is config_sources.py; how text becomes a value is config_keys.py.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Literal, NewType

from mqmk.learner.settings import Policy, ShardLimits, SimilaritySettings, TrainSettings

MatcherName = Literal["sqsk", "sqmk", "mqsk", "mqmk", "mqmk-ei", "cascade"]
Place = NewType("Place", str)
"""A folder, or a URL with `://`."""
S3Url = NewType("S3Url", str)
"""`s3://bucket/prefix`, without a login."""
Sha256 = NewType("Sha256", str)
"""64 hexadecimal digits."""
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})


@dataclass(frozen=True)
class Range:
    """What a number may be, both ends included."""

    least: float
    most: float = float("inf")


Count = Annotated[int, Range(1)]
Seconds = Annotated[float, Range(0)]
Port = Annotated[int, Range(0, 65535)]
Resource = Annotated[float, Range(0)]


def state_folder(environ: Mapping[str, str]) -> Path:
    """`mqmk` in the user's state folder: $XDG_STATE_HOME, or ~/.local/state."""
    home = Path(environ.get("XDG_STATE_HOME", ""))
    return (home if home.is_absolute() else Path("~/.local/state").expanduser()) / "mqmk"


@dataclass(frozen=True)
class State:
    """Where the daemon keeps what it must not lose."""

    dir: Path = field(default_factory=lambda: state_folder(os.environ))
    """Folder of the ledger, the pools and everything else; `$XDG_STATE_HOME/mqmk` if that is set."""


@dataclass(frozen=True)
class Bucket:
    """Where tasks come from, and what is done about them."""

    url: Place | None = None
    """Folder or fsspec URL (`s3://...`) that holds `tasks/`; none is the folder `bucket` of the state folder."""
    poll_seconds: Annotated[float, Range(0.05)] = 2.0
    """Pause between two looks while something happens."""
    max_poll_seconds: Annotated[float, Range(0.05)] = 30.0
    """The pause grows to this while nothing happens."""
    settle_seconds: Seconds = 30.0
    """Shards without TASK.json and _SUCCESS become a task after this long without a change."""
    reconcile_seconds: Annotated[float, Range(1)] = 600.0
    """Pause between two full listings, which find what a quick look missed."""
    after_learning: Literal["keep", "tag", "move", "delete"] = "keep"
    """What happens to the shards of a task that is served."""
    overlap: Literal["reject", "extend"] = "reject"
    """A class that another task has already: reject the task, or learn it and let both answer with the one label."""
    duplicates: Policy = "warn"
    """Nearly the same picture with two labels: say so, or reject the task."""
    imbalance: Policy = "warn"
    """Classes much larger than others (`similarity.imbalance`): say so, or reject the task."""


@dataclass(frozen=True)
class Pools:
    """Where replicas find pool versions. The daemon's own are always in the folder `pools` of the state folder."""

    url: S3Url | None = None
    """`s3://bucket/prefix` for copies of versions; replicas watch its `pools/CURRENT`. None: they watch the folder."""
    keep: Count | None = None
    """So many of the newest versions stay in the folder, and the current one; others go once recorded. None: all."""
    watch_seconds: Annotated[float, Range(0.01)] = 1.0
    """How often a replica looks at the pointer on S3; at the folder's, `serve.watch_seconds`."""
    cache: Path | None = None
    """Where machines with replicas keep what they downloaded; none is a folder among the temporary files."""
    cached: Count = 3
    """So many downloaded versions are kept on a machine."""


@dataclass(frozen=True)
class Backbone:
    """The frozen ViT. Every pool belongs to one: another one means learning anew."""

    name: str = "embedded"
    """`embedded`, or a ViT of timm."""
    weights: Path | None = None
    """Its safetensors file; none asks the model hub."""
    sha256: Sha256 | None = None
    """What the weights must hash to."""
    image_size: Annotated[int | None, Range(8)] = None
    """Pixels; none is the backbone's own size."""


@dataclass(frozen=True)
class Evaluate:
    """How a new version is measured."""

    held_out_per_class: Count = 50
    """At most this many held-out pictures of a class are kept for measuring."""
    matchers: tuple[MatcherName, ...] = ("sqsk", "sqmk", "mqsk", "mqmk", "mqmk-ei", "cascade")
    """Matchers that are measured after every version."""


@dataclass(frozen=True)
class Gate:
    """What a new version must show before it is served."""

    accuracy_floor: Annotated[float, Range(0, 1)] = 0.3
    """Least held-out accuracy of the new task, given the right task."""
    without_held_out: Literal["hold", "promote"] = "hold"
    """A task that brings no held-out pictures: hold it for `mqmk-daemon promote`, or serve it unmeasured."""
    fresh_process: bool = True
    """Also load the version and answer in a process of its own, which costs a few seconds."""


@dataclass(frozen=True)
class Retry:
    """How often a step is tried again when its failure may pass."""

    attempts: Count = 5
    """Tries before a task is quarantined."""
    first_seconds: Seconds = 2.0
    """Pause before the second try; it doubles from there."""
    max_seconds: Seconds = 300.0
    """The pause grows no longer than this."""


@dataclass(frozen=True)
class Ray:
    """Where tasks are trained."""

    address: str = "local"
    """`local` starts a Ray of its own, `none` trains in the daemon and serves nothing, else a cluster's address."""
    num_cpus: Count | None = None
    """Of the local Ray; none is all."""
    num_gpus: Annotated[int | None, Range(0)] = None
    """Of the local Ray; none is all."""
    trainer_cpus: Resource = 1.0
    """CPUs of one trainer."""
    trainer_gpus: Resource = 0.0
    """GPUs of one trainer; may be a fraction."""
    trainers: Count | None = None
    """At most this many tasks are trained at once; none is as many as the resources allow."""
    workers_per_task: Count = 1
    """Trainers that share one task, through Ray Train."""
    object_store_mb: Annotated[int, Range(80)] = 200
    """Shared memory of the local Ray."""
    metrics_port: Port = 0
    """Where the local Ray's own metrics can be scraped; 0 takes a free port."""


@dataclass(frozen=True)
class Serve:
    """Answering over HTTP."""

    enabled: bool = True
    """Serve predictions."""
    host: str = "127.0.0.1"
    """Address to listen at; anything but loopback needs `serve.api_keys` or `serve.open`."""
    port: Port = 8000
    """Port of the HTTP API and the page."""
    replicas: Count = 1
    """Copies of the model; with `serve.max_replicas`, the least."""
    max_replicas: Count | None = None
    """Under load there may be this many copies; none keeps `serve.replicas`."""
    target_requests: Annotated[float, Range(0.1)] = 8.0
    """Requests under way for each copy, above which one more is started."""
    scale_up_seconds: Seconds = 10.0
    """How long there must be too many requests before a copy is added."""
    scale_down_seconds: Seconds = 300.0
    """How long there must be too few requests before a copy is ended."""
    num_cpus: Resource = 0.5
    """CPUs that one replica reserves."""
    num_gpus: Resource = 0.0
    """GPUs that one replica reserves; may be a fraction."""
    matcher: Literal["auto", MatcherName] = "auto"
    """Matcher of a request that names none; `auto` takes the best measured one within `serve.budget`."""
    budget: Annotated[float, Range(1)] = 4.0
    """Queries a picture may cost on average when the matcher is `auto`."""
    max_batch: Count = 32
    """Pictures that are answered together at most."""
    batch_wait_seconds: Seconds = 0.0
    """How long a batch that is not full waits for company; 0 takes what came while the model was busy."""
    max_queue: Count = 256
    """Pictures under way in one replica; the next one is told to come back (429)."""
    request_bytes: Annotated[int, Range(1024)] = 16 * 2**20
    """Largest request (413)."""
    timeout_seconds: Annotated[float, Range(0.1)] = 30.0
    """Longest time for one request."""
    watch_seconds: Annotated[float, Range(0.01)] = 0.25
    """How often a replica looks at the pointer for a new version."""
    agreement_share: Annotated[float, Range(0, 1)] = 0.01
    """Share of the answers that are compared with exact matching, after they were given."""
    api_keys: Path | None = None
    """File with the hashes of the keys that clients may show, one a line; none asks for no key."""
    open: bool = False
    """Serve without keys at an address that is not loopback."""
    proxies: Literal["head", "every"] = "head"
    """Who receives requests: Ray's head, or every node with a replica. Read when Ray Serve is started."""
    haproxy: bool = False
    """Put Ray's bundled HAProxy in front of the local Ray: more requests a second. Needs a new Ray (`stop`)."""

    @property
    def most_replicas(self) -> int:
        """How many copies must have room."""
        return self.max_replicas or self.replicas


@dataclass(frozen=True)
class Mlflow:
    """Where trainings and versions are recorded."""

    enabled: bool = True
    """Keep records."""
    tracking_uri: str | None = None
    """MLflow's tracking store; none is an SQLite file in the state folder."""
    experiment: str = "mqmk"
    """Experiment of the trainings."""
    model: str = "mqmk"
    """Registered model of the pool versions."""


@dataclass(frozen=True)
class Metrics:
    """The daemon's own metrics, for Prometheus."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: Port = 9109
    """Port of `/metrics`."""
    task_labels: Annotated[int, Range(0)] = 100
    """Tasks with a series of their own; the others are added up as `other`."""


@dataclass(frozen=True)
class Log:
    """What the daemon says while it runs."""

    format: Literal["auto", "human", "json"] = "auto"
    """`auto` is human on a terminal and JSON lines elsewhere."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important lines that are shown."""


@dataclass(frozen=True)
class Config:
    """Everything an operator may choose."""

    state: State = field(default_factory=State)
    bucket: Bucket = Bucket()
    pools: Pools = Pools()
    limits: ShardLimits = field(default_factory=ShardLimits)
    similarity: SimilaritySettings = field(default_factory=SimilaritySettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    backbone: Backbone = Backbone()
    evaluate: Evaluate = Evaluate()
    gate: Gate = Gate()
    retry: Retry = Retry()
    ray: Ray = Ray()
    serve: Serve = Serve()
    mlflow: Mlflow = Mlflow()
    metrics: Metrics = Metrics()
    log: Log = Log()

    @property
    def bucket_url(self) -> str:
        """Where tasks come from."""
        return self.bucket.url or str(self.state.dir / "bucket")

    @property
    def ledger_file(self) -> Path:
        """What happened to every task."""
        return self.state.dir / "ledger.sqlite"

    @property
    def pools_folder(self) -> Path:
        """Every pool version, and the pointer."""
        return self.state.dir / "pools"

    @property
    def work_folder(self) -> Path:
        """What training leaves behind until its task is published."""
        return self.state.dir / "work"

    @property
    def held_out_folder(self) -> Path:
        """Pictures that versions are measured on."""
        return self.state.dir / "held-out"

    @property
    def tracking_uri(self) -> str:
        """MLflow's tracking store."""
        return self.mlflow.tracking_uri or f"sqlite:///{self.state.dir / 'mlflow' / 'mlflow.db'}"

    @property
    def artifacts_folder(self) -> Path:
        """Where MLflow keeps files when no tracking server does."""
        return self.state.dir / "mlflow" / "artifacts"

    @property
    def ray_folder(self) -> Path:
        """What the local Ray needs between two starts of the daemon."""
        return self.state.dir / "ray"

    @property
    def ray_head_file(self) -> Path:
        """Where the local Ray can be found: `{"address", "pid", ...}`."""
        return self.ray_folder / "head.json"
