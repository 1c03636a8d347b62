"""The page of `mqmk-daemon evaluate --html`: figures, classes, confusions and the most confident mistakes."""

from pathlib import Path
from typing import Final

from mqmk.daemon.client.scoring import Score, unknown_share
from mqmk.daemon.status.figures import Share
from mqmk.daemon.words import plural
from mqmk.learner.report.render import render
from mqmk.learner.report.thumbnails import thumbnail_url
from mqmk.matcher.errors import ImageError
from mqmk.matcher.images import decode

THUMBNAIL: Final = 96  # pixels


def render_evaluation(place: str, score: Score) -> str:
    """The page as HTML. The images of mistakes are read again."""
    images = sum(each.images for each in score.classes)
    return render(
        "evaluation_page.html.j2",
        __package__,
        heading=f"{plural(images, 'image')} in {plural(len(score.classes), 'class', 'classes')}",
        place=place,
        score=score,
        accuracy=None if score.accuracy is None else Share(score.accuracy, score.images),
        matching=None if score.matching_rate is None else Share(score.matching_rate, score.images),
        unlearned=sum(each.images for each in score.unlearned),
        found_unknown=unknown_share(score.unlearned),
        mistakes=[(each, _thumbnail(each.file)) for each in score.mistakes],
        plural=plural,
    )


def _thumbnail(file: Path) -> str | None:
    """None if the file is gone or was replaced by something else."""
    try:
        return thumbnail_url(decode(file.read_bytes()), THUMBNAIL)
    except (OSError, ImageError):
        return None
