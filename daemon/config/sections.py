"""The settings: one frozen Config of frozen sections, and the paths derived from it.

No heavy imports: every command reads it. The line under a field is its description in docs/configuration.md.
Where values come from is load.py; how text becomes a value is fields.py.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NewType

from mqmk.deploy.serving.ranges import Count, Port, Range, Resource, Seconds
from mqmk.deploy.serving.settings import MatcherName, ServeSettings
from mqmk.learner.settings import BadSamples, Policy, ShardLimits, SimilaritySettings, TrainSettings
from mqmk.matcher.matcher_info import SERVABLE_MATCHERS

Place = NewType("Place", str)
"""A folder, or a URL with `://`."""
S3Url = NewType("S3Url", str)
"""`s3://bucket/prefix`, without a login."""
Sha256 = NewType("Sha256", str)
"""64 hexadecimal digits."""


def state_folder(environ: Mapping[str, str]) -> Path:
    """`mqmk` in the user's state folder: $XDG_STATE_HOME, or ~/.local/state."""
    home = Path(environ.get("XDG_STATE_HOME", ""))
    return (home if home.is_absolute() else Path("~/.local/state").expanduser()) / "mqmk"


@dataclass(frozen=True)
class State:
    """Where the daemon keeps its durable state."""

    dir: Path = field(default_factory=lambda: state_folder(os.environ))
    """State directory: ledger, pools and everything else; `$XDG_STATE_HOME/mqmk` if that is set."""


@dataclass(frozen=True)
class Bucket:
    """Where tasks come from, and how they are handled."""

    url: Place | None = None
    """Folder or fsspec URL (`s3://...`) that contains `tasks/`; none is the folder `bucket` in the state directory."""
    poll_seconds: Annotated[float, Range(0.05)] = 2.0
    """Pause between two scans after something new was found."""
    max_poll_seconds: Annotated[float, Range(0.05)] = 30.0
    """Maximum pause between two scans while nothing new is found; a change in a local folder ends it."""
    settle_seconds: Seconds = 30.0
    """Shards without TASK.json and _SUCCESS become a task after this long without changes."""
    reconcile_seconds: Annotated[float, Range(1)] = 600.0
    """Pause between two full listings of a bucket with more than 5,000 files; a smaller one is listed by every scan."""
    after_learning: Literal["keep", "tag", "move", "delete"] = "keep"
    """What to do with the shards of a task that is served."""
    overlap: Literal["reject", "extend"] = "reject"
    """A class that another task already has: reject the task, or learn it so that both answer with the same label."""
    duplicates: Policy = "warn"
    """Near-duplicate images with different labels: warn, or reject the task."""
    imbalance: Policy = "warn"
    """Classes much larger than others (`similarity.imbalance`): warn, or reject the task."""
    bad_samples: BadSamples = "reject"
    """Unreadable images: reject the task, or skip them with a warning."""
    max_bad_samples: Annotated[float, Range(0)] = 0.05
    """With `bad_samples: skip`, a task with more of them is rejected: a share if below 1, else a number of images."""


@dataclass(frozen=True)
class Pools:
    """Where replicas find pool versions. The daemon keeps its own in the folder `pools` of the state directory."""

    url: S3Url | None = None
    """`s3://bucket/prefix` for copies of versions; replicas watch its `pools/CURRENT`. None: they watch the folder."""
    keep: Count | None = None
    """Number of newest versions to keep, beside the current one; older ones are deleted once recorded. None: all."""
    watch_seconds: Annotated[float, Range(0.01)] = 1.0
    """How often a replica polls CURRENT on S3; for the folder, see `serve.watch_seconds`."""
    cache: Path | None = None
    """Download cache on machines with replicas; none is a temporary folder."""
    cached: Count = 3
    """Number of downloaded versions to keep on a machine."""


@dataclass(frozen=True)
class Backbone:
    """The frozen ViT. A pool belongs to one backbone; another one means learning everything again."""

    name: str = "embedded"
    """`embedded` or a timm ViT."""
    weights: Path | None = None
    """Its safetensors file; none loads it from the model hub."""
    sha256: Sha256 | None = None
    """Expected hash of the weights."""
    image_size: Annotated[int | None, Range(8)] = None
    """Pixels; none is the backbone's own size."""


@dataclass(frozen=True)
class Evaluate:
    """How a new version is evaluated."""

    held_out_per_class: Count = 50
    """Maximum number of held-out images to keep per class."""
    max_images: Count = 1000
    """Maximum number of held-out images, of all tasks together, to evaluate a version on; about 4 queries each."""
    matchers: tuple[MatcherName, ...] = SERVABLE_MATCHERS
    """Matchers to evaluate for every version."""
    false_alarm: Annotated[float, Range(0, 1)] = 0.01
    """Share of known images that may be called unknown."""


@dataclass(frozen=True)
class Gate:
    """What a new version must achieve before it is served."""

    accuracy_floor: Annotated[float, Range(0, 1)] = 0.3
    """Minimum held-out accuracy of the new task, given the right task."""
    without_held_out: Literal["hold", "promote"] = "hold"
    """A task without held-out images: hold it for `mqmk-daemon promote`, or serve it without evaluation."""
    fresh_process: bool = True
    """Also run a smoke test: load the version and predict in a separate process, which takes a few seconds."""


@dataclass(frozen=True)
class Publish:
    """How trained tasks become versions."""

    together: Annotated[int, Range(1, 24)] = 8
    """Maximum number of tasks that one version adds if more than two wait; 1 gives every task a version of its own."""


@dataclass(frozen=True)
class Retry:
    """How a step is retried after a transient failure."""

    attempts: Count = 5
    """Attempts before a task is quarantined."""
    first_seconds: Seconds = 2.0
    """Pause before the second attempt; it doubles each time."""
    max_seconds: Seconds = 300.0
    """Maximum pause."""


@dataclass(frozen=True)
class Ray:
    """Where tasks are trained."""

    address: str = "local"
    """`local` starts a Ray head, `none` trains in the daemon and serves nothing; else the address of a cluster."""
    num_cpus: Count | None = None
    """CPUs of the local Ray; none uses all."""
    num_gpus: Annotated[int | None, Range(0)] = None
    """GPUs of the local Ray; none uses all."""
    trainer_cpus: Resource = 1.0
    """CPUs of one trainer."""
    trainer_gpus: Resource = 0.0
    """GPUs of one trainer; may be a fraction."""
    trainers: Count | None = None
    """Maximum number of tasks trained in parallel; none is as many as the resources allow."""
    workers_per_task: Count = 1
    """Trainers per task, with Ray Train."""
    object_store_mb: Annotated[int, Range(80)] = 200
    """Object store of the local Ray, in MB of shared memory."""
    metrics_port: Port = 0
    """Port of the local Ray's metrics; 0 takes a free port."""


@dataclass(frozen=True)
class Mlflow:
    """Where training runs and versions are recorded."""

    enabled: bool = True
    """Record in MLflow."""
    tracking_uri: str | None = None
    """MLflow's tracking URI; none is an SQLite file in the state directory."""
    experiment: str = "mqmk"
    """Experiment of the training runs."""
    model: str = "mqmk"
    """Registered model of the pool versions."""


@dataclass(frozen=True)
class Metrics:
    """The daemon's Prometheus metrics."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 9109
    """Port of `/metrics`, `/healthz` and `/readyz`; 0 takes a free one."""
    stalled_seconds: Annotated[float, Range(1)] = 300.0
    """`/healthz` fails if the daemon's loop finishes no pass for this long plus `bucket.max_poll_seconds`."""
    task_labels: Annotated[int, Range(0)] = 100
    """Number of tasks with their own series; the others are combined as `other`."""


@dataclass(frozen=True)
class Log:
    """The daemon's log."""

    format: Literal["auto", "human", "json"] = "auto"
    """`auto` is `human` on a terminal and `json` lines elsewhere."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level."""


@dataclass(frozen=True)
class Config:
    """All settings."""

    state: State = field(default_factory=State)
    bucket: Bucket = Bucket()
    pools: Pools = Pools()
    limits: ShardLimits = field(default_factory=ShardLimits)
    similarity: SimilaritySettings = field(default_factory=SimilaritySettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    backbone: Backbone = Backbone()
    evaluate: Evaluate = Evaluate()
    gate: Gate = Gate()
    publish: Publish = Publish()
    retry: Retry = Retry()
    ray: Ray = Ray()
    serve: ServeSettings = field(default_factory=ServeSettings)
    mlflow: Mlflow = Mlflow()
    metrics: Metrics = Metrics()
    log: Log = Log()

    @property
    def bucket_url(self) -> str:
        """The bucket."""
        return self.bucket.url or str(self.state.dir / "bucket")

    @property
    def ledger_file(self) -> Path:
        """The ledger."""
        return self.state.dir / "ledger.sqlite"

    @property
    def pools_folder(self) -> Path:
        """Pool versions and CURRENT."""
        return self.state.dir / "pools"

    @property
    def work_folder(self) -> Path:
        """Results of training runs until their task is published."""
        return self.state.dir / "work"

    @property
    def held_out_folder(self) -> Path:
        """Held-out images for evaluation."""
        return self.state.dir / "held-out"

    @property
    def tracking_uri(self) -> str:
        """MLflow's tracking URI."""
        return self.mlflow.tracking_uri or f"sqlite:///{self.state.dir / 'mlflow' / 'mlflow.db'}"

    @property
    def artifacts_folder(self) -> Path:
        """MLflow's artifacts if there is no tracking server."""
        return self.state.dir / "mlflow" / "artifacts"

    @property
    def ray_folder(self) -> Path:
        """State of the local Ray, which outlives the daemon."""
        return self.state.dir / "ray"

    @property
    def ray_head_file(self) -> Path:
        """The record of the local Ray: `{"address", "pid", ...}`."""
        return self.ray_folder / "head.json"
