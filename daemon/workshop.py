"""What a worker does with a job: reads the bucket, trains, builds and judges versions. Plain Python, no Ray."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mqmk.daemon.bucket import Bucket
from mqmk.daemon.config import Config
from mqmk.daemon.fresh_answer import FreshAnswers
from mqmk.daemon.jobs import Build, Built, Job, Learn, Learned, Progressed, Result, Stale, Validate, Validated
from mqmk.daemon.version_builder import VersionBuilder
from mqmk.learner.manifest import Manifest, derive_manifest, parse_manifest
from mqmk.learner.shard_task import shard_task
from mqmk.learner.shards import survey_shard
from mqmk.learner.tasks import Task
from mqmk.learner.team import ALONE, Team
from mqmk.learner.train import Progress, empty_pool, train_task
from mqmk.learner.validation import TaskReport, validate_task
from mqmk.matcher.backbone import HUB, load_backbone
from mqmk.matcher.pool_files import decode, encode
from mqmk.matcher.prompted_vit import FrozenViT

Report = Callable[[Progressed], None]


class Workshop:
    """The tools of one worker process: configuration, bucket, and the backbone once it is needed."""

    def __init__(self, config: Config, device: torch.device | None = None) -> None:
        self._config = config
        self._device = device
        self._fresh = FreshAnswers()
        self._bucket = Bucket(config.bucket_url, settle_seconds=config.bucket.settle_seconds)

    @cached_property
    def vit(self) -> FrozenViT:
        """The frozen backbone."""
        wanted = self._config.backbone
        return load_backbone(wanted.name, weights=wanted.weights or HUB, sha256=wanted.sha256,
                             image_size=wanted.image_size, device=self._device)  # fmt: skip

    def do(self, job: Job, report: Report) -> Result:
        """Do one job; `report` hears of every epoch."""
        match job:
            case Validate():
                return self._validate(job)
            case Learn():
                return self.learn(job, report)
            case Build():
                return self._build(job)

    def _validate(self, job: Validate) -> Validated:
        manifest = parse_manifest(job.manifest) if job.manifest is not None else self._derived(job)
        wanted = self._config
        report = validate_task(
            manifest,
            partial(self._bucket.open, job.folder),
            wanted.limits,
            known_classes=job.known_classes,
            overlap=wanted.bucket.overlap,
            duplicates=wanted.bucket.duplicates,
            imbalanced=wanted.bucket.imbalance,
            similarity=wanted.similarity,
        )
        return Validated(manifest.to_bytes(), asdict(report))

    def _derived(self, job: Validate) -> Manifest:
        """Shards that came without a manifest are read once to write one."""
        opener = partial(self._bucket.open, job.folder)
        shards = self._bucket.shards(job.folder)
        return derive_manifest(job.name, (survey_shard(shard.name, opener, self._config.limits) for shard in shards))

    def learn(self, job: Learn, report: Report, team: Team = ALONE) -> Learned:
        """Train a task's prompt, alone or as a member of a team."""
        manifest = parse_manifest(job.manifest)
        known = TaskReport(job.report["samples"], job.report["held_out"], tuple(job.report["warnings"]))
        task = shard_task(manifest, partial(self._bucket.open, job.folder), known, self.vit.info,
                          limits=self._config.limits)  # fmt: skip
        settings = replace(self._config.train, accumulate=self._config.train.accumulate * job.split)
        base = empty_pool(self.vit, settings) if job.base is None else decode(job.base, self.vit.info)[1]
        states: list[bytes] = []

        def progress(now: Progress) -> None:
            report(Progressed(asdict(now), states.pop()))

        trained = train_task(
            task, self.vit, base, settings, resume=job.checkpoint, keep=states.append, report=progress, team=team
        )
        alone = trained.added_to(replace(base, tasks=()))
        return Learned(encode(alone, 0, None)[1], save(self._kept(task)))

    def _kept(self, task: Task) -> dict[str, Tensor]:
        """The held-out pictures by which the task will be judged: at most so many of each class, as pixels."""
        size, most = self.vit.info.image_size, self._config.evaluate.held_out_per_class
        pixels, labels = [torch.zeros(0, 3, size, size, dtype=torch.uint8)], [torch.zeros(0, dtype=torch.int64)]
        kept = [0] * len(task.classes)
        for batch in task.held_out.batches(256, seed=None):
            wanted = []
            for place, label in enumerate(batch.labels.tolist()):
                kept[label] += 1
                if kept[label] <= most:
                    wanted.append(place)
            pixels.append(batch.pixels[wanted])
            labels.append(batch.labels[wanted])
        return {"pixels": torch.cat(pixels), "labels": torch.cat(labels)}

    def _build(self, job: Build) -> Built | Stale:
        return VersionBuilder(self.vit, self._config, job, self._fresh).build()

    def close(self) -> None:
        """Let go of what was started."""
        self._fresh.close()


def local_workshop(config: Config, **choices: Any) -> Workshop:
    """A workshop with as many threads as a trainer may use."""
    torch.set_num_threads(max(1, int(config.ray.trainer_cpus)))
    return Workshop(config, **choices)
