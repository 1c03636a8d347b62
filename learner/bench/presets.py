"""The published runs of the paper's benchmarks, for those who have the data. No heavy imports: commands read it.

| preset        | data, as `bench prepare` writes them             | e-prompt rows | blocks | epochs |
|---------------|--------------------------------------------------|--------------:|--------|-------:|
| cifar100-10   | CIFAR-100: 100 classes, 50,000 and 10,000 images |            40 | 2-8    |    170 |
| imagenet-r-5  | ImageNet-R: 200 classes, 24,000 and 6,000 images |            80 | 2-10   |    200 |
| imagenet-r-10 | the same                                         |            80 | 2-10   |    170 |
| imagenet-r-20 | the same                                         |            20 | 2-10   |    150 |
| domainnet-10  | DomainNet: 200 classes, 47,532 and 20,450 images |            90 | 2-10   |    430 |

All of them: ViT-B/16 of ImageNet-21k at 224 px, images scaled to 0..1 without mean and deviation, training on crops
from 5 % of the original image, mirrored; test images resized to 256 and cut to 224; Adam with a constant rate of
0.005 * 64 / 256 and batches of 64; prompts that begin in +-1 as a copy of the previous task's; the g-prompt trained on
every task; learned keys; free head rows without a scale; classes in the order of their names. Where text and code of
the paper differ, this is the code (docs/method.md).
"""

from dataclasses import dataclass
from typing import Final

from mqmk.learner.settings import Augmentation, TrainSettings

LEARNING_RATE: Final = 0.005 * 64 / 256
"""The published code scales the rate that the paper prints by the batch."""


@dataclass(frozen=True)
class Preset:
    """One benchmark of the paper."""

    tasks: int
    classes: int
    images: tuple[int, int]
    """To train on and to test with."""
    train: TrainSettings
    backbone: str = "vit_base_patch16_224.orig_in21k"
    image_size: int = 224
    crop: float = 224 / 256
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    least_area: float = 0.05
    """The smallest random crop of an original image."""


def _train(e_length: int, last_e_layer: int, epochs: int) -> TrainSettings:
    return TrainSettings(
        epochs=epochs,
        batch=64,
        learning_rate=LEARNING_RATE,
        schedule="constant",
        e_length=e_length,
        e_layers=tuple(range(2, last_e_layer + 1)),
        start="previous",
        spread=1.0,
        g_prompt="always",
        keys="learned",
        head="free",
        augmentation=Augmentation(least_area=1.0),  # the original image was cropped before
        patches=1.0,
    )


CIFAR100, IMAGENET_R, DOMAINNET = (50_000, 10_000), (24_000, 6_000), (47_532, 20_450)

PRESETS: Final[dict[str, Preset]] = {
    "cifar100-10": Preset(10, 100, CIFAR100, _train(e_length=40, last_e_layer=8, epochs=170)),
    "imagenet-r-5": Preset(5, 200, IMAGENET_R, _train(e_length=80, last_e_layer=10, epochs=200)),
    "imagenet-r-10": Preset(10, 200, IMAGENET_R, _train(e_length=80, last_e_layer=10, epochs=170)),
    "imagenet-r-20": Preset(20, 200, IMAGENET_R, _train(e_length=20, last_e_layer=10, epochs=150)),
    "domainnet-10": Preset(10, 200, DOMAINNET, _train(e_length=90, last_e_layer=10, epochs=430)),
}
