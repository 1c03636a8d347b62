"""The front door: what a program needs to learn and to predict, imported when it is first used.

>>> model = mqmk.Classifier(mqmk.load_backbone("embedded"))
>>> model = model.learn("birds", "photos/birds")  # photos/birds/owl/*.jpg, photos/birds/heron/*.jpg
>>> model.save("pool")
>>> mqmk.load("pool").predict(["owl.jpg"])[0].label
'owl'
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mqmk.learner.classifier import Classifier, load
    from mqmk.learner.settings import TrainSettings
    from mqmk.matcher.backbone import load_backbone
    from mqmk.matcher.errors import MqmkError
    from mqmk.matcher.pool import PromptPool, TaskPrompt
    from mqmk.matcher.predictor import Prediction, PredictSettings
    from mqmk.matcher.prompted_vit import FrozenViT

    __version__: str

__all__ = [
    "Classifier",
    "FrozenViT",
    "MqmkError",
    "PredictSettings",
    "Prediction",
    "PromptPool",
    "TaskPrompt",
    "TrainSettings",
    "__version__",
    "load",
    "load_backbone",
]

# A second list beside the imports above, because the command line answers before torch could be imported.
_HOMES = {
    "Classifier": "mqmk.learner.classifier",
    "FrozenViT": "mqmk.matcher.prompted_vit",
    "MqmkError": "mqmk.matcher.errors",
    "PredictSettings": "mqmk.matcher.predictor",
    "Prediction": "mqmk.matcher.predictor",
    "PromptPool": "mqmk.matcher.pool",
    "TaskPrompt": "mqmk.matcher.pool",
    "TrainSettings": "mqmk.learner.settings",
    "load": "mqmk.learner.classifier",
    "load_backbone": "mqmk.matcher.backbone",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("mqmk-daemon")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_HOMES[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
