"""Runs a job: validates a task, trains its prompt, or builds and evaluates a version. Plain Python, no Ray."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from mqmk.daemon.bucket.scanner import Bucket
from mqmk.daemon.builder.held_out_files import HeldOutFiles
from mqmk.daemon.builder.smoke_test import SmokeTest
from mqmk.daemon.builder.version_builder import PoolCache, VersionBuilder
from mqmk.daemon.config.sections import Config
from mqmk.daemon.jobs import Build, Built, EpochProgress, Job, Learn, Learned, Result, Validate, Validated
from mqmk.learner.data.manifest import Manifest, derive_manifest
from mqmk.learner.data.shard_task import shard_task
from mqmk.learner.data.shards import survey_shard
from mqmk.learner.data.tasks import Task
from mqmk.learner.data.validation import TaskReport, validate_task
from mqmk.learner.evaluation.sample import image_ids
from mqmk.learner.training.process_group import SINGLE_PROCESS, ProcessGroup
from mqmk.learner.training.train import Progress, empty_pool, train_task
from mqmk.matcher.backbone import HUB, load_backbone
from mqmk.matcher.pool_files import decode, encode
from mqmk.matcher.prompted_vit import FrozenViT

Report = Callable[[EpochProgress], None]


class JobRunner:
    """One per worker process: the configuration, the bucket, and the backbone once it is needed."""

    def __init__(self, config: Config, device: torch.device | None = None) -> None:
        self._config = config
        self._device = device
        self._smoke_test = SmokeTest()
        self._held_out = HeldOutFiles()
        self._pool_cache = PoolCache()
        self._bucket = Bucket(config.bucket_url, settle_seconds=config.bucket.settle_seconds)

    @cached_property
    def vit(self) -> FrozenViT:
        """The frozen backbone."""
        wanted = self._config.backbone
        return load_backbone(wanted.name, weights=wanted.weights or HUB, sha256=wanted.sha256,
                             image_size=wanted.image_size, device=self._device)  # fmt: skip

    def run(self, job: Job, report: Report) -> Result:
        """Run one job; `report` is called after every epoch."""
        match job:
            case Validate():
                return self._validate(job)
            case Learn():
                return self.learn(job, report)
            case Build():
                return self._build(job)

    def _validate(self, job: Validate) -> Validated:
        manifest = job.manifest or self._derive_manifest(job)
        wanted = self._config
        report = validate_task(
            manifest,
            partial(self._bucket.open_shard, job.folder),
            wanted.limits,
            known_classes=job.known_classes,
            overlap=wanted.bucket.overlap,
            duplicates=wanted.bucket.duplicates,
            imbalanced=wanted.bucket.imbalance,
            similarity=wanted.similarity,
            bad_samples=wanted.bucket.bad_samples,
            max_bad_samples=wanted.bucket.max_bad_samples,
        )
        return Validated(manifest, report.to_json())

    def _derive_manifest(self, job: Validate) -> Manifest:
        """Reads all shards of a task that has no manifest."""
        opener = partial(self._bucket.open_shard, job.folder)
        shards = self._bucket.shards(job.folder)
        return derive_manifest(job.name, (survey_shard(shard.name, opener, self._config.limits) for shard in shards))

    def learn(self, job: Learn, report: Report, group: ProcessGroup = SINGLE_PROCESS) -> Learned:
        """Train a task's prompt, in this process or as one of several."""
        task = shard_task(job.manifest, partial(self._bucket.open_shard, job.folder), TaskReport.from_json(job.report),
                          self.vit.info, limits=self._config.limits)  # fmt: skip
        settings = replace(self._config.train, accumulate=self._config.train.accumulate * job.split)
        base = empty_pool(self.vit, settings) if job.base is None else decode(job.base, self.vit.info)[1]
        states: list[bytes] = []

        def progress(now: Progress) -> None:
            report(EpochProgress(asdict(now), states.pop()))

        trained = train_task(
            task,
            self.vit,
            base,
            settings,
            resume=job.checkpoint,
            on_checkpoint=states.append,
            on_epoch=progress,
            group=group,
        )
        single = trained.added_to(replace(base, tasks=()))
        return Learned(encode(single, 0, None)[1], save(self._sample_held_out(task)))

    def _sample_held_out(self, task: Task) -> dict[str, Tensor]:
        """The pixels of held-out images, at most `evaluate.held_out_per_class` of each class."""
        size, most = self.vit.info.image_size, self._config.evaluate.held_out_per_class
        pixels, labels = [torch.zeros(0, 3, size, size, dtype=torch.uint8)], [torch.zeros(0, dtype=torch.int64)]
        seen = [0] * len(task.classes)
        for batch in task.held_out.batches(256, seed=None):
            chosen = []
            for place, label in enumerate(batch.labels.tolist()):
                seen[label] += 1
                if seen[label] <= most:
                    chosen.append(place)
            pixels.append(batch.pixels[chosen])
            labels.append(batch.labels[chosen])
        return {"pixels": (found := torch.cat(pixels)), "labels": torch.cat(labels), "ids": image_ids(found)}

    def _build(self, job: Build) -> Built:
        return VersionBuilder(self.vit, self._config, job, self._smoke_test, self._held_out, self._pool_cache).build()

    def close(self) -> None:
        """Stop the smoke test's process."""
        self._smoke_test.close()


def local_runner(config: Config, **choices: Any) -> JobRunner:
    """A runner with as many threads as a trainer may use."""
    torch.set_num_threads(max(1, int(config.ray.trainer_cpus)))
    return JobRunner(config, **choices)
