"""How well does the service answer? Pictures it never saw go over HTTP, mixed, and the answers are counted."""

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from statistics import fmean
from typing import Final
from urllib.parse import urlsplit

from mqmk.daemon.demo_pictures import Question
from mqmk.daemon.errors import DaemonError

PICTURES_PER_REQUEST: Final = 32
BYTES_PER_REQUEST: Final = 8 * 2**20
PATIENCE_SECONDS: Final = 60.0
"""How long one request is tried again: a service that starts has no route yet, a busy one says 429."""
PASSING: Final = (404, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Answer:
    """What the service said about one picture."""

    label: str
    task: str
    matcher: str
    queries: int
    pool_version: int


@dataclass(frozen=True)
class Answers:
    """What the service said about some pictures, counted."""

    asked: int
    versions: tuple[int, ...]
    """Of the pool; more than one if a new one was swapped in meanwhile."""
    matcher: str
    queries: float
    """For one picture, on average."""
    matching_rate: float
    """Pictures that were answered with the prompt of their own task."""
    by_task: Mapping[str, float]
    """Accuracy of each task, in the order in which they were learned."""
    seconds: float

    @property
    def accuracy(self) -> float:
        """The mean over tasks."""
        return fmean(self.by_task.values())


def ask(
    url: str, questions: Sequence[Question], matcher: str | None = None, between: Callable[[], None] = lambda: None
) -> Answers:
    """Ask about every picture, mixed; `between` is called after each request."""
    mixed = random.Random(0).sample(questions, len(questions))  # the same order every time
    begun, answers = time.monotonic(), list[Answer]()
    for some in _requests(mixed):
        answers += _answered(url, some, matcher)
        between()
    return _counted(questions, dict(zip(mixed, answers, strict=True)), time.monotonic() - begun)


def _counted(questions: Sequence[Question], answered: Mapping[Question, Answer], seconds: float) -> Answers:
    right: dict[str, list[bool]] = {}
    for question in questions:
        right.setdefault(question.task, []).append(question.label == answered[question].label)
    answers = list(answered.values())
    used = [answer.matcher for answer in answers]
    return Answers(
        asked=len(answers),
        versions=tuple(sorted({answer.pool_version for answer in answers})),
        matcher=max(set(used), key=used.count),
        queries=fmean(answer.queries for answer in answers),
        matching_rate=fmean(question.task == answer.task for question, answer in answered.items()),
        by_task={task: fmean(each) for task, each in right.items()},
        seconds=seconds,
    )


def _requests(questions: Sequence[Question]) -> Iterator[list[tuple[Question, bytes]]]:
    """As many pictures in one request as the service takes."""
    some, size = list[tuple[Question, bytes]](), 0
    for question in questions:
        picture = question.path.read_bytes()
        if some and (len(some) == PICTURES_PER_REQUEST or size + len(picture) > BYTES_PER_REQUEST):
            yield some
            some, size = [], 0
        some.append((question, picture))
        size += len(picture)
    if some:
        yield some


def _answered(url: str, some: Sequence[tuple[Question, bytes]], matcher: str | None) -> list[Answer]:
    content_type, body = _form([picture for _, picture in some])
    path = "/predict?top_k=1" + (f"&matcher={matcher}" if matcher else "")
    found = json.loads(_posted(url, path, content_type, body))
    rows = found if isinstance(found, list) else [found]
    names = ("label", "task", "matcher", "queries", "pool_version")
    return [Answer(**{name: row[name] for name in names}) for row in rows]


def _form(pictures: Sequence[bytes]) -> tuple[str, bytes]:
    boundary = uuid.uuid4().hex
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="picture"\r\n\r\n'.encode()
    parts = b"".join(head + picture + b"\r\n" for picture in pictures)
    return f"multipart/form-data; boundary={boundary}", parts + f"--{boundary}--\r\n".encode()


def _posted(url: str, path: str, content_type: str, body: bytes) -> bytes:
    """A question may be asked twice, so whatever may pass is tried again."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            status, said = _post(url, path, content_type, body)
        except (OSError, HTTPException) as error:
            status, said = 503, repr(error).encode()
        if status == 200:
            return said
        if status not in PASSING or time.monotonic() > deadline:
            raise DaemonError(
                f"{url}{path}: expected an answer, got {status}: {said[:300].decode(errors='replace')}; "
                "`mqmk-daemon status --state FOLDER` says who serves"
            )
        time.sleep(0.3)


def _post(url: str, path: str, content_type: str, body: bytes) -> tuple[int, bytes]:
    """Straight to the service: a proxy that is configured for other addresses is not asked."""
    with closing(HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_SECONDS)) as connection:
        connection.request("POST", path, body, {"Content-Type": content_type})
        response = connection.getresponse()
        return response.status, response.read()


def is_up(url: str) -> bool:
    """Whether something answers there."""
    parts = urlsplit(url)
    try:
        with closing(HTTPConnection(parts.netloc, timeout=2)) as connection:
            connection.request("GET", parts.path or "/")
            return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
