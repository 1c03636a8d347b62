"""The percentages that users see: shares of held-out images, with the number of images and a 95 % interval.

Every percentage has one definition: the share of the images of a version (or of one of its tasks) that were correct
when the version was built. `status`, `versions` and `report` show the same number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mqmk.daemon.words import plural

Z: Final = 1.959964
"""95 % of a normal distribution lie within this many standard deviations of its mean."""


@dataclass(frozen=True)
class Share:
    """A share of images."""

    value: float
    images: int | None = None
    """None if the version did not record it."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % Wilson score interval; unlike the normal one it is valid for few images and near 0 and 100 %."""
        if not self.images:
            return None
        n, square = self.images, Z * Z
        centre = (self.value + square / (2 * n)) / (1 + square / n)
        half_width = Z * math.sqrt(self.value * (1 - self.value) / n + square / (4 * n * n)) / (1 + square / n)
        return max(0.0, centre - half_width), min(1.0, centre + half_width)

    @property
    def margin(self) -> float | None:
        """The distance from the value to the farther end of the interval."""
        if self.interval is None:
            return None
        low, high = self.interval
        return max(self.value - low, high - self.value)

    @property
    def points(self) -> str | None:
        """The margin in percentage points, to two digits."""
        if self.margin is None:
            return None
        return f"{100 * self.margin:.1f}" if self.margin < 0.0995 else f"{100 * self.margin:.0f}"

    def cell(self) -> str:
        """`94.5% ±2.2`, for a table with a column for the number of images."""
        return f"{self.value:.1%}" if self.points is None else f"{self.value:.1%} ±{self.points}"

    def __str__(self) -> str:
        """`94.5% (±2.2, 550 images)`."""
        if self.points is None or self.images is None:
            return f"{self.value:.1%}"
        return f"{self.value:.1%} (±{self.points}, {plural(self.images, 'image')})"


@dataclass(frozen=True)
class Figures:
    """How well a version, or one of its tasks, does on held-out images; None if not measured."""

    matching: Share | None = None
    accuracy: Share | None = None
    calibration_error: float | None = None
    """Expected calibration error of `probability`; of a version only, and None for those of older releases."""

    @property
    def images(self) -> int | None:
        """The number of images that both are shares of."""
        return self.accuracy.images if self.accuracy else None

    def document(self) -> dict[str, Any]:
        """For --json."""
        found: dict[str, Any] = {"images": self.images}
        for name, share in (("matching_rate", self.matching), ("accuracy", self.accuracy)):
            found[name] = share.value if share else None
            found[f"{name}_interval"] = list(share.interval) if share and share.interval else None
        return found

    def version_document(self) -> dict[str, Any]:
        """For --json, about a whole version."""
        return self.document() | {"calibration_error": self.calibration_error}


def version_figures(evaluation: Mapping[str, Any]) -> Figures:
    """Over all images of a version's evaluation."""
    if evaluation.get("accuracy") is None or evaluation.get("matching_rate") is None:
        return Figures()
    if "images" not in evaluation and (summed := _sum_tasks(evaluation)):
        return summed
    images = evaluation.get("images", evaluation.get("held_out"))
    return Figures(
        Share(evaluation["matching_rate"], images),
        Share(evaluation["accuracy"], images),
        evaluation.get("calibration_error"),
    )


def task_figures(evaluation: Mapping[str, Any], name: str) -> Figures:
    """Over the images of one task."""
    row = evaluation.get("tasks", {}).get(name)
    if row is None:
        return Figures()
    images = row.get("images", sum(evaluation.get("confusion", {}).get(name, {}).values()) or None)
    return Figures(Share(row["matching_rate"], images), Share(row["accuracy"], images))


def _sum_tasks(evaluation: Mapping[str, Any]) -> Figures | None:
    """Older versions recorded means over tasks; shares of images follow from the tasks and their images."""
    tasks = [task_figures(evaluation, name) for name in evaluation["tasks"]]
    if not tasks or any(each.images is None for each in tasks):
        return None
    total = sum(each.images or 0 for each in tasks)
    shares = [
        sum((each.images or 0) * share.value for each, share in zip(tasks, column, strict=True) if share) / total
        for column in ([each.matching for each in tasks], [each.accuracy for each in tasks])
    ]
    return Figures(Share(shares[0], total), Share(shares[1], total))
