"""`mqmk-daemon predict`: what is in these pictures?"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.commands.asking import all_told, asking_options, list_errors

if TYPE_CHECKING:
    from rich.table import Table

    from mqmk.daemon.told import Oracle, Told, Wishes


@click.command()
@click.argument("places", metavar="FILE_OR_FOLDER...", nargs=-1, required=True,
                type=click.Path(exists=True, path_type=Path))  # fmt: skip
@click.option("--top-k", type=click.IntRange(1, 100), help="Also show the next best classes, so many in all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@asking_options
def predict(
    asked: "Callable[[Wishes], Oracle]", places: tuple[Path, ...], matcher: str | None, top_k: int | None, as_json: bool
) -> None:
    """Say what is in pictures, asking the running service. Exits with 1 if a picture got no answer.

    Of folders every JPEG, PNG and WebP is asked about. A service that wants an API key gets the one in MQMK_API_KEY.
    """
    from mqmk.daemon.picture_files import pictures_of
    from mqmk.daemon.told import Wishes

    oracle = asked(Wishes(matcher, top_k))
    told = all_told(oracle, pictures_of(places))
    if as_json:
        click.echo(json.dumps(_document(oracle, told), indent=2))
    else:
        _print(told, top_k)
    raise SystemExit(int(any(each.error is not None for each in told)))


def _document(oracle: "Oracle", told: "Sequence[Told]") -> dict[str, Any]:
    return {
        "asked": oracle.place,
        "answers": [{"file": str(each.file)} | dict(each.answer) for each in told if each.answer is not None],
        "errors": [{"file": str(each.file), "error": each.error} for each in told if each.error is not None],
    }


def _print(told: "Sequence[Told]", top_k: int | None) -> None:
    from rich.console import Console

    answered = [each for each in told if each.answer is not None]
    if answered:
        Console().print(_table(answered, with_others=bool(top_k and top_k > 1)))
    list_errors(told)


def _table(told: "Sequence[Told]", with_others: bool) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table()
    table.add_column("file", overflow="fold")
    for column in ("label", "probability", "task", "margin", "unknown"):
        table.add_column(column, justify="right" if column in ("probability", "margin") else "left")
    if with_others:
        table.add_column("next best")
    for each in told:
        said = each.answer or {}
        match = said["match"]
        cells = [str(each.file), said["label"], f"{said['probability']:.1%}", said["task"],
                 "" if match["margin"] is None else f"{match['margin']:.3f}", _unknown(match["unknown"])]  # fmt: skip
        others = [", ".join(f"{row['label']} {row['probability']:.1%}" for row in said["top"][1:])]
        table.add_row(*(Text(cell) for cell in cells + (others if with_others else [])))
    return table


def _unknown(said: bool | None) -> str:
    return {None: "not known", True: "yes", False: "no"}[said]
