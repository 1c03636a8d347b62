"""Who takes input from strangers, how is it made for them, and what must become of it?

Each subject makes an input from dice, and tries it: it is `accepted`, `rejected: code` or `quarantined: code`, or
something is raised, which is a failure.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import mutated_images
import mutated_requests
import mutated_tars
from daemon_parts import daemon, small_config
from mutated_bytes import Dice, damaged
from mutated_json import changed as changed_json
from tars import GOOD, files, manifest, opener, tar

from mqmk.daemon.jobs import Job, Validate
from mqmk.daemon.ledger import TaskRow
from mqmk.daemon.workers import InlineWorkers
from mqmk.daemon.workshop import Workshop
from mqmk.learner.errors import TaskRejected
from mqmk.learner.manifest import derive_manifest, parse_manifest
from mqmk.learner.shard_task import shard_task
from mqmk.learner.shards import survey_shard
from mqmk.learner.similarity import picture_hash
from mqmk.learner.validation import validate_task
from mqmk.matcher.errors import ImageError
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.prompted_vit import BackboneInfo

INFO: Final = BackboneInfo("any", "0" * 64, 224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class Input(Protocol):
    """What is handed in, and can be kept."""

    def to_bytes(self) -> bytes:
        """All of it."""


@dataclass(frozen=True)
class Plain:
    """Input that is nothing but bytes."""

    data: bytes

    def to_bytes(self) -> bytes:
        return self.data


Attempt = Callable[[Any], str]
"""Takes an input; says `accepted`, `rejected: code` or `quarantined: code`, and raises whatever else happens."""


@dataclass(frozen=True)
class Subject:
    """Something that takes input from strangers."""

    make: Callable[[Dice], Input]
    open: Callable[[], Attempt]
    """Made once in every child."""
    share: float = 1.0
    """Of the cases."""


# Tars


def read_tar(given: Plain) -> str:
    """With a manifest that is true about the bytes, and without one; what is accepted must be readable for training."""
    surveyed = _surveyed(given.data)
    promised = manifest(given.data, samples=12) if given.data else manifest(b"x", samples=12)
    try:
        report = validate_task(promised, opener(given.data))
    except TaskRejected as error:
        return _refused(error)
    task = shard_task(promised, opener(given.data), report, INFO)
    read = sum(len(batch) for side in (task.training, task.held_out) for batch in side.batches(8, seed=0))
    assert read == 12, f"12 samples were accepted, {read} can be read"
    assert surveyed == "accepted", f"validation accepts what the survey refuses: {surveyed}"
    return "accepted"


def _surveyed(data: bytes) -> str:
    try:
        derive_manifest("birds", [survey_shard("birds-000000.tar", opener(data))]).to_bytes()
    except TaskRejected as error:
        return _refused(error)
    return "accepted"


def _refused(error: TaskRejected) -> str:
    assert error.code and error.reason and str(error).encode(), f"no reason: {error!r}"
    return f"rejected: {error.code}"


# Manifests


def make_manifest(dice: Dice) -> Plain:
    """TASK.json, changed as JSON or as bytes."""
    good = manifest(GOOD, tar(files(("owl",))), samples=12).to_bytes()
    return Plain(damaged(good, dice) if dice.random() < 0.25 else changed_json(json.loads(good), dice))


def read_manifest(given: Plain) -> str:
    """What is accepted can be written and read again, and is the same task."""
    try:
        found = parse_manifest(given.data)
    except TaskRejected as error:
        return _refused(error)
    assert parse_manifest(found.to_bytes()) == found
    assert len(found.identity) == 64
    return "accepted"


# Pictures


def read_image(given: Plain) -> str:
    """Through everything that is done with a picture: decoded, hashed, made ready for the backbone."""
    try:
        picture = decode(given.data)
    except ImageError as error:
        return "rejected: image" if str(error).encode() else "rejected without a reason"
    picture_hash(picture)
    assert prepare(picture, INFO).isfinite().all()
    return "accepted"


# Requests


def open_http() -> Attempt:
    """A replica's whole API, on the embedded backbone and a small pool."""
    sys.path.insert(0, str(Path(__file__).parent / "deploy"))
    from fingerprints import marked_pool, publish

    from mqmk.deploy.api import build_api
    from mqmk.deploy.pool_holder import PoolHolder
    from mqmk.deploy.service import Service
    from mqmk.deploy.settings import ServeSettings
    from mqmk.matcher.backbone import load_backbone
    from mqmk.matcher.pool_store import PoolStore
    from mqmk.matcher.predictor import PredictSettings

    pools, vit = Path(tempfile.mkdtemp(prefix="mqmk-pools-")), load_backbone()
    publish(pools, marked_pool(vit, 1), 1)
    holder = PoolHolder(PoolStore(pools), vit, PredictSettings())
    holder.look()
    shutil.rmtree(pools)
    app, loop = build_api(Service(vit, holder, ServeSettings(pools))), asyncio.new_event_loop()

    def ask(request: mutated_requests.Request) -> str:
        reply = loop.run_until_complete(mutated_requests.send(app, request))
        if 200 <= reply.status < 300:
            return "accepted"
        assert 400 <= reply.status < 500, f"status {reply.status}: {reply.body[:300]!r}"
        assert request.method == "HEAD" or json.loads(reply.body)["error"], f"no reason: {reply.body[:300]!r}"
        return f"rejected: {reply.status}"

    known = ((b"x-request-id", mutated_requests.KNOWN.encode()),)
    assert ask(mutated_requests.Request(b"/predict", known, mutated_requests.PICTURE)) == "accepted"
    return ask


# Folders in the bucket


@dataclass(frozen=True)
class Folder:
    """Files of one task, as they lie in the bucket."""

    files: Mapping[str, bytes]

    def to_bytes(self) -> bytes:
        return tar(list(self.files.items()))


def make_folder(dice: Dice) -> Folder:
    """A shard and its manifest, of which one or both were damaged; at times without the manifest."""
    data = mutated_tars.changed(dice) if dice.random() < 0.6 else GOOD
    true = manifest(data or b"x", samples=12).to_bytes()
    said = true if dice.random() < 0.4 else make_manifest(dice).data
    known = {"birds-000000.tar": data, "TASK.json" if dice.random() < 0.8 else "_SUCCESS": said}
    return Folder(known)


class OnlyValidates(InlineWorkers):
    """A worker that reads tasks and never trains: what it accepts stays VALIDATED."""

    def room_for(self, kind: type[Job]) -> bool:
        return kind is Validate


def open_folders() -> Attempt:
    """The real daemon: bucket, ledger, orchestrator."""
    home = Path(tempfile.mkdtemp(prefix="mqmk-folders-"))
    numbers = iter(range(10**9))

    def drop(given: Folder) -> str:
        place = home / str(next(numbers))
        folder = place / "bucket" / "tasks" / "birds"
        folder.mkdir(parents=True)
        for name, data in given.files.items():
            (folder / name).write_bytes(data)
        config = small_config(place)
        config = replace(config, bucket=replace(config.bucket, settle_seconds=0.0))
        parts = daemon(config, workers=lambda known: OnlyValidates(Workshop(known)))
        try:
            for _ in range(4):
                parts.orchestrator.run_pass()
            return _became(parts.ledger.tasks())
        finally:
            parts.close()
            shutil.rmtree(place)

    return drop


def _became(tasks: list[TaskRow]) -> str:
    assert len(tasks) == 1, f"{len(tasks)} tasks came of one folder"
    (task,) = tasks
    if task.state == "VALIDATED":
        return "accepted"
    assert task.state == "QUARANTINED" and task.reason and task.code, f"{task.state}: {task.code}: {task.reason}"
    assert task.code not in ("gave-up", "failed"), f"not a judgement of the data: {task.code}: {task.reason}"
    return f"quarantined: {task.code}"


SUBJECTS: Final[dict[str, Subject]] = {
    "tar": Subject(lambda dice: Plain(mutated_tars.changed(dice)), lambda: read_tar, 2.5),
    "manifest": Subject(make_manifest, lambda: read_manifest, 2.0),
    "image": Subject(lambda dice: Plain(mutated_images.changed(dice)), lambda: read_image, 2.5),
    "http": Subject(mutated_requests.changed, open_http, 2.5),
    "folder": Subject(make_folder, open_folders, 0.5),
}
