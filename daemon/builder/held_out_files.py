"""The held-out images of every task, a file each: what they are is remembered, pixels are read when they are needed.

A file that was lost or damaged is as good as one without images: the sample gets smaller by them, and nothing else.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int, UInt8
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mqmk.learner.evaluation.sample import Sample, TaskImages, image_ids
from mqmk.learner.evaluation.sample_matches import ReadPixels


class HeldOutFiles:
    """Lives as long as the process that builds versions, so that a build opens only files that are new to it."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], TaskImages]] = {}

    def list_images(self, paths: Sequence[Path]) -> list[TaskImages]:
        """Ids and labels of the images in each file."""
        return [self._list(path) for path in paths]

    def _list(self, path: Path) -> TaskImages:
        try:
            now = path.stat()
            stamp = now.st_mtime_ns, now.st_size
            if path not in self._known or self._known[path][0] != stamp:
                self._known[path] = stamp, _read_index(path)
        except (OSError, SafetensorError, KeyError):
            self._known.pop(path, None)
            return TaskImages.empty()
        return self._known[path][1]


def _read_index(path: Path) -> TaskImages:
    with safe_open(path, framework="pt") as file:
        # Files of older releases have no ids.
        ids = file.get_tensor("ids") if "ids" in file.keys() else image_ids(file.get_tensor("pixels"))  # noqa: SIM118
        return TaskImages.of(ids.clone(), file.get_tensor("labels").clone())


def pixel_reader(paths: Sequence[Path], sample: Sample) -> ReadPixels:
    """Read images of a sample from the files of its tasks."""

    def read(rows: Int[Tensor, " some"]) -> UInt8[Tensor, "some 3 height width"]:
        pixels: dict[int, Tensor] = {}
        task = sample.task[rows]
        for number in task.unique().tolist():
            with safe_open(paths[number], framework="pt") as file:
                images = file.get_slice("pixels")
                for row in (task == number).nonzero()[:, 0].tolist():
                    pixels[row] = images[int(sample.place[rows[row]])]
        return torch.stack([pixels[row] for row in range(len(rows))])

    return read
