"""How well does the service predict? Images it never saw go over HTTP, mixed, and right answers are counted."""

import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from mqmk.daemon.client.http import BUSY, HttpClient, NoReplyError
from mqmk.daemon.demo.tasks import UnseenImage
from mqmk.daemon.errors import DaemonError

IMAGES_PER_REQUEST: Final = 32
BYTES_PER_REQUEST: Final = 8 * 2**20
RETRY_SECONDS: Final = 60.0
RETRY_ON: Final = (404, 500, *BUSY)
"""A service that is starting has no route yet."""


@dataclass(frozen=True)
class Prediction:
    """The service's answer for one image."""

    label: str
    task: str
    matcher: str
    queries: int
    pool_version: int


@dataclass(frozen=True)
class MatcherScore:
    """How well the service predicted some images with one matcher."""

    asked: int
    """How many images."""
    versions: tuple[int, ...]
    """Of the pool; more than one if a new version was swapped in meanwhile."""
    matcher: str
    queries: float
    """Per image, on average."""
    matching_rate: float
    """Share of images that were matched to their own task."""
    by_task: Mapping[str, float]
    """Accuracy of each task, in the order in which they were learned."""
    seconds: float

    @property
    def accuracy(self) -> float:
        """The mean over tasks."""
        return fmean(self.by_task.values())


def score_images(
    url: str,
    images: Sequence[UnseenImage],
    matcher: str | None = None,
    after_request: Callable[[], None] = lambda: None,
) -> MatcherScore:
    """Predict every image, mixed, and count; `after_request` is called after each request."""
    client = HttpClient(url, use_proxy=False)
    mixed = random.Random(0).sample(images, len(images))  # the same order every time
    begun, predictions = time.monotonic(), list[Prediction]()
    for batch in _batches(mixed):
        predictions += _predict(client, [data for _, data in batch], matcher)
        after_request()
    return _score(images, dict(zip(mixed, predictions, strict=True)), time.monotonic() - begun)


def _score(
    images: Sequence[UnseenImage], predictions: Mapping[UnseenImage, Prediction], seconds: float
) -> MatcherScore:
    right: dict[str, list[bool]] = {}
    for image in images:
        right.setdefault(image.task, []).append(image.label == predictions[image].label)
    matchers = [each.matcher for each in predictions.values()]
    return MatcherScore(
        asked=len(predictions),
        versions=tuple(sorted({each.pool_version for each in predictions.values()})),
        matcher=max(set(matchers), key=matchers.count),
        queries=fmean(each.queries for each in predictions.values()),
        matching_rate=fmean(image.task == each.task for image, each in predictions.items()),
        by_task={task: fmean(each) for task, each in right.items()},
        seconds=seconds,
    )


def _batches(images: Sequence[UnseenImage]) -> Iterator[list[tuple[UnseenImage, bytes]]]:
    """As many images in one request as the service takes."""
    batch, size = list[tuple[UnseenImage, bytes]](), 0
    for image in images:
        data = image.path.read_bytes()
        if batch and (len(batch) == IMAGES_PER_REQUEST or size + len(data) > BYTES_PER_REQUEST):
            yield batch
            batch, size = [], 0
        batch.append((image, data))
        size += len(data)
    if batch:
        yield batch


def _predict(client: HttpClient, images: Sequence[bytes], matcher: str | None) -> list[Prediction]:
    content_type, body = _form(images)
    path = "/predict?top_k=1" + (f"&matcher={matcher}" if matcher else "")
    try:
        reply = client.post(path, body, content_type, RETRY_SECONDS, RETRY_ON)
    except NoReplyError as error:
        raise DaemonError(f"{error}; `mqmk-daemon status --state FOLDER` shows what is serving") from error
    if reply.status != 200:
        raise DaemonError(
            f"{client.url}{path}: expected an answer, got {reply.status}: {reply.error}; "
            "`mqmk-daemon status --state FOLDER` shows what is serving"
        )
    rows = reply.document if isinstance(reply.document, list) else [reply.document]
    names = ("label", "task", "matcher", "queries", "pool_version")
    return [Prediction(**{name: row[name] for name in names}) for row in rows]


def _form(images: Sequence[bytes]) -> tuple[str, bytes]:
    boundary = uuid.uuid4().hex
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n\r\n'.encode()
    parts = b"".join(head + image + b"\r\n" for image in images)
    return f"multipart/form-data; boundary={boundary}", parts + f"--{boundary}--\r\n".encode()


def is_up(url: str) -> bool:
    """Whether a GET of this URL succeeds."""
    try:
        return HttpClient(url, timeout=2, use_proxy=False).get("").status == 200
    except NoReplyError:
        return False
