"""The paper's settings for its benchmarks, for those who have the data. No heavy imports: the command line reads it.

| preset        | data, as `{train,test}/CLASS/*`                         | e-prompt rows | blocks | epochs |
|---------------|---------------------------------------------------------|--------------:|--------|-------:|
| cifar100-10   | CIFAR-100: 100 classes, 50,000 and 10,000 images      |            40 | 2-8    |    170 |
| imagenet-r-5  | ImageNet-R: 200 classes, 24,000 and 6,000 images      |            80 | 2-10   |    200 |
| imagenet-r-10 | the same                                                |            80 | 2-10   |    170 |
| imagenet-r-20 | the same                                                |            20 | 2-10   |    150 |
| domainnet-10  | DomainNet: 200 classes, 47,532 and 20,450 images      |            90 | 2-10   |    430 |

All of them: ViT-B/16 at 224 px, images scaled to 0..1 without mean and deviation, crops from 5 % of the area,
mirrored; test images resized to 256 and cut to 224; Adam with a rate of 0.005 and batches of 64; prompts that begin
in +-1 as a copy of the previous task's; the g-prompt trained on every task; learned keys.
"""

from dataclasses import dataclass
from typing import Final

from mqmk.learner.settings import Augmentation, TrainSettings


@dataclass(frozen=True)
class Preset:
    """One benchmark of the paper."""

    tasks: int
    classes: int
    train: TrainSettings
    backbone: str = "vit_base_patch16_224"
    image_size: int = 224
    crop: float = 224 / 256
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


def _preset(tasks: int, classes: int, e_length: int, last_e_layer: int, epochs: int) -> Preset:
    published = TrainSettings(
        epochs=epochs,
        batch=64,
        learning_rate=0.005,
        e_length=e_length,
        e_layers=tuple(range(2, last_e_layer + 1)),
        start="previous",
        spread=1.0,
        g_prompt="always",
        keys="learned",
        augmentation=Augmentation(least_area=0.05),
        patches=1.0,
    )
    return Preset(tasks, classes, published)


PRESETS: Final[dict[str, Preset]] = {
    "cifar100-10": _preset(10, 100, e_length=40, last_e_layer=8, epochs=170),
    "imagenet-r-5": _preset(5, 200, e_length=80, last_e_layer=10, epochs=200),
    "imagenet-r-10": _preset(10, 200, e_length=80, last_e_layer=10, epochs=170),
    "imagenet-r-20": _preset(20, 200, e_length=20, last_e_layer=10, epochs=150),
    "domainnet-10": _preset(10, 200, e_length=90, last_e_layer=10, epochs=430),
}
