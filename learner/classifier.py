"""An image classifier as one value: learn from class folders, predict, save, load. What `import mqmk` hands out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from mqmk.learner.data.streams import decode_file, read_class_folders
from mqmk.learner.errors import SettingsError
from mqmk.learner.settings import TrainSettings
from mqmk.learner.training.train import empty_pool, train_task
from mqmk.matcher.backbone import EMBEDDED, load_backbone
from mqmk.matcher.errors import BackboneError, MatchError, PoolError
from mqmk.matcher.images import decode, prepare, to_rgb
from mqmk.matcher.pool import PromptPool
from mqmk.matcher.pool_store import PoolStore, open_pool
from mqmk.matcher.predictor import Prediction, PredictSettings, name_answers, predict
from mqmk.matcher.prompted_vit import BackboneInfo, FrozenViT

ImageSource = str | Path | bytes | Image.Image
_BATCH = 64  # images in memory at a time


@dataclass(frozen=True, eq=False, repr=False)
class Classifier:
    """A frozen ViT and what was learned on it. Learning returns another classifier; this one stays as it is.

    >>> model = Classifier(load_backbone("embedded"))
    >>> model = model.learn("birds", "photos/birds").learn("tools", "photos/tools")
    >>> model.predict(["owl.jpg"])[0].label
    'owl'
    """

    backbone: FrozenViT
    pool: PromptPool | None = None
    """None before the first task. Kept on the backbone's device."""

    def __post_init__(self) -> None:
        if self.pool is None:
            return
        if self.pool.backbone != self.backbone.info:
            wanted, got = _describe(self.pool.backbone), _describe(self.backbone.info)
            raise PoolError(f"the pool was trained on {wanted}, not on {got}; load the backbone it was trained on")
        object.__setattr__(self, "pool", self.pool.to(self.backbone.device))

    def __repr__(self) -> str:
        return f"Classifier({self.backbone.info.name}, tasks: {', '.join(self.tasks) or 'none'})"

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks that were learned, in order."""
        return tuple(task.name for task in self.pool.tasks) if self.pool else ()

    def learn(self, task: str, folder: str | Path, settings: TrainSettings | None = None) -> "Classifier":
        """A classifier that also knows the classes of a folder; what earlier tasks compute does not change.

        The folder has a folder of JPEG, PNG or WebP images for each class.

        >>> model = model.learn("birds", "photos/birds")  # photos/birds/owl/*.jpg, photos/birds/heron/*.jpg
        """
        settings = settings or TrainSettings()
        if settings.g_prompt == "always":
            raise SettingsError("g_prompt: expected `first`; `always` would change the answers of earlier tasks")
        if task in self.tasks:
            raise PoolError(f"a task {task!r} was already learned; choose another name")
        pool = self.pool or empty_pool(self.backbone, settings)
        images = read_class_folders(task, Path(folder), self.backbone.info)
        return replace(self, pool=train_task(images, self.backbone, pool, settings).added_to(pool))

    def predict(
        self, images: Iterable[ImageSource], settings: PredictSettings | None = None, top_k: int = 5
    ) -> list[Prediction]:
        """An answer for each image, in order: paths, encoded bytes or PIL images of any size and mode.

        >>> answer = model.predict(["owl.jpg"])[0]
        >>> answer.label, answer.probability, answer.task
        ('owl', 0.97, 'birds')
        """
        if isinstance(images, str | bytes | Path | Image.Image):
            raise TypeError(f"expected a list of images, got one {type(images).__name__}; write predict([image])")
        if self.pool is None or not self.pool.tasks:
            raise MatchError("nothing was learned yet; call learn() first")
        answers: list[Prediction] = []
        for batch in _batches(images, self.backbone.info):
            answers += name_answers(self.pool, predict(self.backbone, self.pool, batch, settings), top_k)
        return answers

    def save(self, folder: str | Path) -> None:
        """Write what was learned as a new version in a folder, durable when this returns; `load` reads the newest.

        >>> model.save("pool")
        """
        if self.pool is None:
            raise PoolError("nothing was learned yet, so there is nothing to save; call learn() first")
        store = PoolStore(Path(folder))
        current = store.current()
        newest = max(store.paths(), default=0)
        store.point_at(store.write(self.pool, newest + 1, current.version if current else None))


def load(folder: str | Path, backbone: FrozenViT | None = None) -> Classifier:
    """The classifier that `save` wrote; also what a daemon serves (its state directory, or a card in it) or exports.

    The backbone is loaded by the name that the pool recorded: the embedded one, or the model hub's. A
    backbone with weights of your own must be given.

    >>> model = load("pool")
    >>> model = load("pool", load_backbone("vit_tiny_patch16_224", weights="tiny.safetensors"))
    """
    _, pool = open_pool(Path(folder))
    return Classifier(backbone or _load_recorded_backbone(pool.backbone), pool)


def _load_recorded_backbone(info: BackboneInfo) -> FrozenViT:
    try:
        return load_backbone(info.name, sha256=info.weights_sha256, image_size=info.image_size)
    except BackboneError as error:
        call = f'mqmk.load_backbone("{info.name}", weights="FILE.safetensors", image_size={info.image_size})'
        advice = "use the release it came with" if info.name == EMBEDDED else f"give it: mqmk.load(folder, {call})"
        raise BackboneError(
            f"the pool was trained on {_describe(info)}, which was not found; {advice}. The reason: {error}"
        ) from error


def _describe(info: BackboneInfo) -> str:
    return f"{info.name} (sha256 {info.weights_sha256[:12]}, {info.image_size} px)"


def _batches(images: Iterable[ImageSource], info: BackboneInfo) -> Iterator[Float[Tensor, "batch 3 height width"]]:
    prepared = (prepare(_load_rgb(image), info) for image in images)
    while part := list(islice(prepared, _BATCH)):
        yield torch.stack(part)


def _load_rgb(image: ImageSource) -> Image.Image:
    if isinstance(image, Image.Image):
        return to_rgb(image)
    return decode(image) if isinstance(image, bytes) else decode_file(Path(image))
