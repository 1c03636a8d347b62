"""What does a pool on disk say about files of pictures? No service, no Ray: the backbone and the predictor, here."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.daemon.config import Config
from mqmk.daemon.told import Told, Wishes
from mqmk.deploy.schemas import answer_body
from mqmk.deploy.service import Answered
from mqmk.matcher.backbone import HUB, load_backbone
from mqmk.matcher.calibration import confidence_of
from mqmk.matcher.errors import ImageError, PoolError
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.pointer import POINTER, read_pointer
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import CARD, read_pool
from mqmk.matcher.predictor import Prediction, PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import FrozenViT

TOGETHER: Final = 32
TOP_K: Final = 5


@dataclass(frozen=True, eq=False)
class StoredPool:
    """One version, and the backbone it was trained on."""

    folder: Path
    version: int
    pool: PromptPool
    vit: FrozenViT
    settings: PredictSettings
    wishes: Wishes = field(default_factory=Wishes)

    @property
    def place(self) -> str:
        return str(self.folder)

    def tasks(self) -> Mapping[str, Sequence[str]]:
        return {task.name: task.classes for task in self.pool.tasks}

    def answers(self, files: Sequence[Path]) -> Iterator[Told]:
        for first in range(0, len(files), TOGETHER):
            yield from self._some(files[first : first + TOGETHER])

    def _some(self, files: Sequence[Path]) -> Iterator[Told]:
        read = {file: self._read(file) for file in files}
        images = {file: found for file, found in read.items() if isinstance(found, Tensor)}
        answers = dict(zip(images, self._predictions([*images.values()]), strict=True))
        for file, found in read.items():
            yield Told(file, error=found) if isinstance(found, str) else self._told(file, answers[file])

    def _read(self, file: Path) -> Float[Tensor, "3 height width"] | str:
        """What the backbone sees of it, or why it cannot be read."""
        try:
            return prepare(decode(file.read_bytes()), self.vit.info)
        except OSError as error:
            return str(error.strerror)
        except ImageError as error:
            return str(error)

    def _predictions(self, images: Sequence[Float[Tensor, "3 height width"]]) -> list[Prediction]:
        if not images:
            return []
        predicted = predict(self.vit, self.pool, torch.stack([*images]).to(self.vit.device), self.settings)
        return name_answers(self.pool, predicted, self.wishes.top_k or TOP_K)

    def _told(self, file: Path, found: Prediction) -> Told:
        threshold = confidence_of(self.pool.matching, found.matcher).threshold
        unknown = None if threshold is None else found.score < threshold
        body = answer_body(Answered("", found, (), unknown, self.version), with_scores=False)
        return Told(file, answer={name: value for name, value in body.items() if name != "id"})  # none to remember


def open_pool(place: Path, config: Config, wishes: Wishes, *, own_backbone: bool) -> StoredPool:
    """A version's folder, or the current version of a `pools` folder or state directory.

    `own_backbone`: the one that the pool names; else the configured one, which must be the same.
    """
    folder = _version_folder(place)
    version, pool = read_pool(folder)
    if not pool.tasks:
        raise PoolError(f"{folder}: this version knows no task; choose another one")
    wanted = config.backbone
    vit = load_backbone(
        pool.backbone.name if own_backbone else wanted.name,
        weights=wanted.weights or HUB,
        sha256=wanted.sha256,
        image_size=pool.backbone.image_size if own_backbone else wanted.image_size,
    )
    settings = PredictSettings(wishes.matcher or config.serve.matcher, config.serve.budget)
    return StoredPool(folder, version.version, read_pool(folder, vit.info)[1].to(vit.device), vit, settings, wishes)


def _version_folder(place: Path) -> Path:
    if (place / CARD).is_file():
        return place
    for store in (place, place / "pools"):
        if pointer := read_pointer(store):
            return store / pointer.folder
    raise PoolError(f"{place}: expected a version's folder with {CARD}, or a pool store with {POINTER}; found neither")
