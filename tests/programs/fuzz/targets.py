"""The fuzz targets: everything that accepts untrusted input.

Each target generates an input from a random number generator and tries it. The outcome is `accepted`,
`rejected: code` or `quarantined: code`; an exception is a failure.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

from programs.fuzz import mutate_requests
from programs.fuzz.mutate_bytes import Rng, mutate_bytes
from programs.fuzz.mutate_images import mutate_image
from programs.fuzz.mutate_json import mutate_json
from programs.fuzz.mutate_tars import mutate_tar
from support.daemons.daemon import daemon, small_config
from support.shards import GOOD, files, manifest, opener, tar

from mqmk.daemon.jobs import Job, Validate
from mqmk.daemon.ledger.ledger import TaskRow
from mqmk.daemon.workers.pool import InlineWorkers
from mqmk.daemon.workers.runner import JobRunner
from mqmk.learner.data.manifest import derive_manifest, parse_manifest
from mqmk.learner.data.shard_task import shard_task
from mqmk.learner.data.shards import survey_shard
from mqmk.learner.data.similarity import image_hash
from mqmk.learner.data.validation import validate_task
from mqmk.learner.errors import TaskRejected
from mqmk.matcher.errors import ImageError
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.prompted_vit import BackboneInfo

INFO: Final = BackboneInfo("any", "0" * 64, 224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class Input(Protocol):
    """An input that can be saved."""

    def to_bytes(self) -> bytes:
        """The complete input."""


@dataclass(frozen=True)
class RawInput:
    """An input that consists of bytes only."""

    data: bytes

    def to_bytes(self) -> bytes:
        return self.data


Attempt = Callable[[Any], str]
"""Takes an input; returns `accepted`, `rejected: code` or `quarantined: code`, and raises on anything else."""


@dataclass(frozen=True)
class Target:
    """One component that accepts untrusted input."""

    make: Callable[[Rng], Input]
    set_up: Callable[[], Attempt]
    """Called once in every child process."""
    share: float = 1.0
    """Relative share of the cases."""


# Tars


def check_tar(given: RawInput) -> str:
    """Read with a matching manifest and without one; what is accepted must be readable for training."""
    surveyed = _survey(given.data)
    promised = manifest(given.data, samples=12) if given.data else manifest(b"x", samples=12)
    try:
        report = validate_task(promised, opener(given.data))
    except TaskRejected as error:
        return _describe_rejection(error)
    task = shard_task(promised, opener(given.data), report, INFO)
    read = sum(len(batch) for side in (task.training, task.held_out) for batch in side.batches(8, seed=0))
    assert read == 12, f"12 samples were accepted, {read} can be read"
    assert surveyed == "accepted", f"validation accepts what the survey rejects: {surveyed}"
    return "accepted"


def _survey(data: bytes) -> str:
    try:
        derive_manifest("birds", [survey_shard("birds-000000.tar", opener(data))]).to_bytes()
    except TaskRejected as error:
        return _describe_rejection(error)
    return "accepted"


def _describe_rejection(error: TaskRejected) -> str:
    assert error.code and error.reason and str(error).encode(), f"no reason: {error!r}"
    return f"rejected: {error.code}"


# Manifests


def make_manifest(rng: Rng) -> RawInput:
    """TASK.json, mutated as JSON or as bytes."""
    good = manifest(GOOD, tar(files(("owl",))), samples=12).to_bytes()
    return RawInput(mutate_bytes(good, rng) if rng.random() < 0.25 else mutate_json(json.loads(good), rng))


def check_manifest(given: RawInput) -> str:
    """An accepted manifest survives a round trip."""
    try:
        found = parse_manifest(given.data)
    except TaskRejected as error:
        return _describe_rejection(error)
    assert parse_manifest(found.to_bytes()) == found
    assert len(found.identity) == 64
    return "accepted"


# Images


def check_image(given: RawInput) -> str:
    """Decode, hash and preprocess, as for training and serving."""
    try:
        image = decode(given.data)
    except ImageError as error:
        return "rejected: image" if str(error).encode() else "rejected without a reason"
    image_hash(image)
    assert prepare(image, INFO).isfinite().all()
    return "accepted"


# Requests


def set_up_http() -> Attempt:
    """A replica's complete API, on the embedded backbone and a small pool."""
    from support.serving.fingerprints import marked_pool, publish

    from mqmk.deploy.serving.http.app import build_api
    from mqmk.deploy.serving.inference import Service
    from mqmk.deploy.serving.pools.live_pool import LivePool
    from mqmk.deploy.serving.settings import ServiceSpec
    from mqmk.matcher.backbone import load_backbone
    from mqmk.matcher.pool_store import PoolStore
    from mqmk.matcher.predictor import PredictSettings

    pools, vit = Path(tempfile.mkdtemp(prefix="mqmk-pools-")), load_backbone()
    publish(pools, marked_pool(vit, 1), 1)
    live_pool = LivePool(PoolStore(pools), vit, PredictSettings())
    live_pool.poll()
    shutil.rmtree(pools)
    app, loop = build_api(Service(vit, live_pool, ServiceSpec(pools))), asyncio.new_event_loop()

    def ask(request: mutate_requests.Request) -> str:
        reply = loop.run_until_complete(mutate_requests.send(app, request))
        if 200 <= reply.status < 300:
            return "accepted"
        assert 400 <= reply.status < 500, f"status {reply.status}: {reply.body[:300]!r}"
        assert request.method == "HEAD" or json.loads(reply.body)["error"], f"no reason: {reply.body[:300]!r}"
        return f"rejected: {reply.status}"

    known = ((b"x-request-id", mutate_requests.KNOWN_REQUEST_ID.encode()),)
    assert ask(mutate_requests.Request(b"/predict", known, mutate_requests.IMAGE)) == "accepted"
    return ask


# Folders in the bucket


@dataclass(frozen=True)
class TaskFolder:
    """The files of one task in the bucket."""

    files: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        return tar(list(self.files.items()))


def make_folder(rng: Rng) -> TaskFolder:
    """A shard and its manifest, one or both mutated, sometimes without the manifest."""
    data = mutate_tar(rng) if rng.random() < 0.6 else GOOD
    valid = manifest(data or b"x", samples=12).to_bytes()
    text = valid if rng.random() < 0.4 else make_manifest(rng).data
    known = {"birds-000000.tar": data, "TASK.json" if rng.random() < 0.8 else "_SUCCESS": text}
    return TaskFolder(known)


class ValidateOnlyWorkers(InlineWorkers):
    """Validates tasks and never trains, so accepted tasks stay VALIDATED."""

    def has_capacity(self, kind: type[Job]) -> bool:
        return kind is Validate


def set_up_folders() -> Attempt:
    """The daemon's own bucket, ledger and orchestrator."""
    home = Path(tempfile.mkdtemp(prefix="mqmk-folders-"))
    numbers = iter(range(10**9))

    def drop(given: TaskFolder) -> str:
        place = home / str(next(numbers))
        folder = place / "bucket" / "tasks" / "birds"
        folder.mkdir(parents=True)
        for name, data in given.files.items():
            (folder / name).write_bytes(data)
        config = small_config(place)
        config = replace(config, bucket=replace(config.bucket, settle_seconds=0.0))
        parts = daemon(config, workers=lambda known: ValidateOnlyWorkers(JobRunner(known)))
        try:
            for _ in range(4):
                parts.run_pass()
            return _describe_outcome(parts.ledger.tasks())
        finally:
            parts.close()
            shutil.rmtree(place)

    return drop


def _describe_outcome(tasks: list[TaskRow]) -> str:
    assert len(tasks) == 1, f"{len(tasks)} tasks were discovered in one folder"
    (task,) = tasks
    if task.state == "VALIDATED":
        return "accepted"
    assert task.state == "QUARANTINED" and task.reason and task.code, f"{task.state}: {task.code}: {task.reason}"
    assert task.code not in ("gave-up", "failed"), f"not an error in the data: {task.code}: {task.reason}"
    return f"quarantined: {task.code}"


TARGETS: Final[dict[str, Target]] = {
    "tar": Target(lambda rng: RawInput(mutate_tar(rng)), lambda: check_tar, 2.5),
    "manifest": Target(make_manifest, lambda: check_manifest, 2.0),
    "image": Target(lambda rng: RawInput(mutate_image(rng)), lambda: check_image, 2.5),
    "http": Target(mutate_requests.mutate_request, set_up_http, 2.5),
    "folder": Target(make_folder, set_up_folders, 0.5),
}
