"""GET /pool: what has been learned, a page of tasks at a time. The JSON of a task is built once for each pool."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlencode

from mqmk.deploy.serving.http.schemas import PoolBody, TaskBody
from mqmk.deploy.serving.inference import CHOICES
from mqmk.deploy.serving.pools.live_pool import LoadedPool
from mqmk.matcher.matcher_info import AUTO
from mqmk.matcher.pool import PromptPool, cache_on_pool

PAGE: Final = 100
"""Tasks in a page unless a request asks for another number."""
MAX_PAGE: Final = 1000
MAX_SEARCH: Final = 200
Order = Literal["oldest", "newest"]


@dataclass(frozen=True)
class PageChoice:
    """Which tasks a request asks for."""

    limit: int = PAGE
    offset: int = 0
    search: str = ""
    """In the name of the task or of one of its classes, whatever the case."""
    order: Order = "oldest"

    def next_after(self, found: int) -> str | None:
        """The query of the page after this one, relative to the address of this one; None if this is the last."""
        if self.offset + self.limit >= found:
            return None
        chosen = {"limit": self.limit, "offset": self.offset + self.limit, "search": self.search, "order": self.order}
        return "?" + urlencode({name: value for name, value in chosen.items() if value != getattr(PageChoice, name)})


def pool_page(loaded: LoadedPool | None, backbone: str, matcher: str, choice: PageChoice) -> bytes:
    """The body of a response."""
    listing = _list_tasks(loaded.pool) if loaded else _Listing((), (), 0)
    found = listing.find(choice.search)
    ordered = found if choice.order == "oldest" else found[::-1]
    body = PoolBody(
        pool_version=loaded.version if loaded else None,
        digest=loaded.pointer.digest if loaded else None,
        backbone=backbone,
        matcher=loaded.auto if loaded and matcher == AUTO else matcher,
        matchers=list(CHOICES),
        classes=listing.num_classes,
        num_tasks=len(listing.bodies),
        num_classes=listing.num_classes,
        found=len(found),
        next=choice.next_after(len(found)),
        tasks=[],
        matching=_without_reference(loaded.pool.matching) if loaded else {},
    )
    fields = {name: _to_json(value) for name, value in body.model_dump().items()}
    page = ordered[choice.offset : choice.offset + choice.limit]
    fields["tasks"] = b"[" + b",".join(listing.bodies[number] for number in page) + b"]"
    return b"{" + b",".join(_to_json(name) + b":" + value for name, value in fields.items()) + b"}"


@dataclass(frozen=True, eq=False)
class _Listing:
    bodies: tuple[bytes, ...]
    """Each task as JSON."""
    names: tuple[str, ...]
    """The name and classes of each task as one text, for searching."""
    num_classes: int

    def find(self, search: str) -> Sequence[int]:
        """The numbers of the tasks in which a text occurs."""
        if not search:
            return range(len(self.names))
        wanted = search.casefold()
        return [number for number, names in enumerate(self.names) if wanted in names]


@cache_on_pool
def _list_tasks(pool: PromptPool) -> _Listing:
    bodies = (
        TaskBody(name=task.name, classes=list(task.classes), samples=task.samples, trained_at=task.trained_at,
                 metrics=dict(task.metrics))
        for task in pool.tasks
    )  # fmt: skip
    return _Listing(
        bodies=tuple(_to_json(body.model_dump()) for body in bodies),
        names=tuple("\n".join((task.name, *task.classes)).casefold() for task in pool.tasks),
        num_classes=len({name for task in pool.tasks for name in task.classes}),
    )


def _to_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _without_reference(matching: Mapping[str, Any]) -> dict[str, Any]:
    """Without the reference of drift: a histogram or two for every task, which only replicas read."""
    return {name: value for name, value in matching.items() if name != "reference"}
