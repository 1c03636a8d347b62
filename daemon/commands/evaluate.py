"""`mqmk-daemon evaluate`: how well are pictures answered whose classes are known?"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.commands.asking import all_told, asking_options, list_errors

if TYPE_CHECKING:
    from mqmk.daemon.score import ClassScore, Score
    from mqmk.daemon.told import Oracle, Told, Wishes


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@asking_options
def evaluate(asked: "Callable[[Wishes], Oracle]", folder: Path, matcher: str | None, as_json: bool) -> None:
    """Ask about the pictures of FOLDER/CLASS/* and count right answers. Exits with 1 if a picture got no answer.

    The classes must be named as they were learned. Pictures of other classes are asked about, too: how many of them
    are seen to be unknown is told apart from the rest. Take pictures that were not in the bucket.
    """
    from mqmk.daemon.picture_files import class_folders
    from mqmk.daemon.score import owners_of, scored
    from mqmk.daemon.told import Wishes

    classes = class_folders(folder)
    oracle = asked(Wishes(matcher, 1))
    owners = owners_of(classes, oracle.tasks())
    told = all_told(oracle, [file for files in classes.values() for file in files])
    score = scored(classes, owners, told)
    if as_json:
        click.echo(json.dumps(_document(oracle, score, told), indent=2))
    else:
        _print(score)
        list_errors(told)
    raise SystemExit(int(any(each.error is not None for each in told)))


def _document(oracle: "Oracle", score: "Score", told: "Sequence[Told]") -> dict[str, Any]:
    figures = ("pictures", "accuracy", "accuracy_by_class", "matching_rate", "unknown_share")
    rates = ("accuracy", "matching_rate", "unknown_share")
    return {
        "asked": oracle.place,
        "pool_versions": list(score.versions),
        "matchers": list(score.matchers),
        **{name: getattr(score, name) for name in figures},
        "classes": [asdict(each) | {name: getattr(each, name) for name in rates} for each in score.classes],
        "errors": [{"file": str(each.file), "error": each.error} for each in told if each.error is not None],
    }


def _print(score: "Score") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for column in ("class", "task", "pictures", "right", "matched", "unknown", "most often mistaken for"):
        table.add_column(column, justify="right" if column in ("pictures", "right", "matched", "unknown") else "left")
    for each in score.classes:
        task = ", ".join(each.tasks) or "not learned"
        shares = [_share(each.accuracy), _share(each.matching_rate), _share(each.unknown_share)]
        table.add_row(*map(Text, (each.label, task, str(each.pictures), *shares, each.mistaken_for or "")))
    Console().print(table)
    for line in _summary(score):
        click.echo(line)


def _summary(score: "Score") -> list[str]:
    versions, matchers = ", ".join(map(str, score.versions)), ", ".join(score.matchers)
    lines = [
        f"accuracy {score.accuracy:.1%} of {score.pictures} pictures ({score.accuracy_by_class:.1%} as the mean over "
        f"{len(score.learned)} classes), matching rate {score.matching_rate:.1%}, looked unknown "
        f"{_share(score.unknown_share) or 'cannot be told'}; version {versions}, {matchers}"
    ]
    return lines + ([_strangers(score.strangers)] if score.strangers else [])


def _strangers(classes: "Sequence[ClassScore]") -> str:
    from mqmk.daemon.score import unknown_share

    share = _share(unknown_share(classes)) or "nobody can tell how many"
    return (
        f"of {sum(each.pictures for each in classes)} pictures of classes that were not learned, {share} looked unknown"
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
