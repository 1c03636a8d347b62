"""Predictions of a pool on disk, in this process: no service, no Ray."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from mqmk.daemon.client.predictor import PredictionResult, PredictOptions
from mqmk.daemon.config.sections import Config
from mqmk.deploy.serving.answer import answer_json, make_answer
from mqmk.matcher.backbone import HUB, load_backbone
from mqmk.matcher.calibration import read_confidence
from mqmk.matcher.errors import ImageError, PoolError
from mqmk.matcher.images import decode, prepare
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_files import require_backbone
from mqmk.matcher.pool_store import open_pool as read_stored_pool
from mqmk.matcher.predictor import Prediction, PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import FrozenViT

BATCH: Final = 32
TOP_K: Final = 5


@dataclass(frozen=True, eq=False)
class LocalPredictor:
    """One pool version, and the backbone it was trained on."""

    folder: Path
    version: int
    pool: PromptPool
    vit: FrozenViT
    settings: PredictSettings
    options: PredictOptions = field(default_factory=PredictOptions)

    @property
    def place(self) -> str:
        return str(self.folder)

    def tasks(self) -> Mapping[str, Sequence[str]]:
        return {task.name: task.classes for task in self.pool.tasks}

    def predict(self, files: Sequence[Path]) -> Iterator[PredictionResult]:
        for first in range(0, len(files), BATCH):
            yield from self._predict_batch(files[first : first + BATCH])

    def _predict_batch(self, files: Sequence[Path]) -> Iterator[PredictionResult]:
        inputs = {file: self._read(file) for file in files}
        images = {file: found for file, found in inputs.items() if isinstance(found, Tensor)}
        predictions = dict(zip(images, self._predict_images([*images.values()]), strict=True))
        for file, found in inputs.items():
            if isinstance(found, str):
                yield PredictionResult(file, error=found)
            else:
                yield PredictionResult(file, answer=self._answer(predictions[file]))

    def _read(self, file: Path) -> Float[Tensor, "3 height width"] | str:
        """The input of the backbone, or why the file cannot be read."""
        try:
            return prepare(decode(file.read_bytes()), self.vit.info)
        except OSError as error:
            return str(error.strerror)
        except ImageError as error:
            return str(error)

    def _predict_images(self, images: Sequence[Float[Tensor, "3 height width"]]) -> list[Prediction]:
        if not images:
            return []
        predicted = predict(self.vit, self.pool, torch.stack([*images]).to(self.vit.device), self.settings)
        return name_answers(self.pool, predicted, self.options.top_k or TOP_K)

    def _answer(self, prediction: Prediction) -> dict[str, object]:
        """As POST /predict answers, without the id: there is no feedback on it."""
        confidence = read_confidence(self.pool.matching, prediction.matcher)
        unknown = confidence.is_unknown(prediction.probability, prediction.score)
        answer = answer_json(make_answer("", prediction, self.version, unknown))
        del answer["id"]
        return answer


def open_pool(place: Path, config: Config, options: PredictOptions, *, own_backbone: bool) -> LocalPredictor:
    """An exported version, a card, or the current version of a `pools` folder or state directory.

    With `own_backbone`, the backbone that the pool names; else the configured one, which must be the same.
    """
    version, pool = read_stored_pool(place)
    if not pool.tasks:
        raise PoolError(f"{place}: this version contains no task; choose another one")
    configured = config.backbone
    vit = load_backbone(
        pool.backbone.name if own_backbone else configured.name,
        weights=configured.weights or HUB,
        sha256=configured.sha256,
        image_size=pool.backbone.image_size if own_backbone else configured.image_size,
    )
    settings = PredictSettings(options.matcher or config.serve.matcher, config.serve.budget)
    require_backbone(pool.backbone, vit.info)
    return LocalPredictor(place, version.version, pool.to(vit.device), vit, settings, options)
