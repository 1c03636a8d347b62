"""`mqmk-daemon predict`: classify images."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.cli.predict_options import list_errors, predict_files, predict_options
from mqmk.daemon.cli.tables import new_table, print_whole

if TYPE_CHECKING:
    from rich.table import Table

    from mqmk.daemon.client.predictor import PredictionResult, PredictOptions, Predictor


@click.command()
@click.argument("places", metavar="FILE_OR_FOLDER...", nargs=-1, required=True,
                type=click.Path(exists=True, path_type=Path))  # fmt: skip
@click.option("--top-k", type=click.IntRange(1, 100), help="Show the K best classes.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@predict_options
def predict(
    open_predictor: "Callable[[PredictOptions], Predictor]",
    places: tuple[Path, ...],
    matcher: str | None,
    top_k: int | None,
    as_json: bool,
) -> None:
    """Classify images with the running service. Exits with 1 if an image got no answer.

    A folder stands for every JPEG, PNG and WebP image in and below it. If the service requires an API key, set
    MQMK_API_KEY.
    """
    from mqmk.daemon.client.image_files import find_images
    from mqmk.daemon.client.predictor import PredictOptions

    predictor = open_predictor(PredictOptions(matcher, top_k))
    results = predict_files(predictor, find_images(places))
    if as_json:
        click.echo(json.dumps(_document(predictor, results), indent=2))
    else:
        _print(results, top_k)
    raise SystemExit(int(any(each.error is not None for each in results)))


def _document(predictor: "Predictor", results: "Sequence[PredictionResult]") -> dict[str, Any]:
    return {
        "asked": predictor.place,
        "answers": [{"file": str(each.file)} | dict(each.answer) for each in results if each.answer is not None],
        "errors": [{"file": str(each.file), "error": each.error} for each in results if each.error is not None],
    }


def _print(results: "Sequence[PredictionResult]", top_k: int | None) -> None:
    answered = [each for each in results if each.answer is not None]
    if answered:
        print_whole(_table(answered, with_others=bool(top_k and top_k > 1)))
    list_errors(results)


def _table(results: "Sequence[PredictionResult]", with_others: bool) -> "Table":
    from rich.text import Text

    names = ("file", "label", "probability", "task", "margin", "unknown", *(["next best"] if with_others else []))
    words = ("file", "label", "task", "next best")
    table = new_table(*names, fold=words, right=("probability", "margin"))
    for each in results:
        answer = each.answer or {}
        match = answer["match"]
        cells = [str(each.file), answer["label"], f"{answer['probability']:.1%}", answer["task"],
                 "" if match["margin"] is None else f"{match['margin']:.3f}", _unknown(match["unknown"])]  # fmt: skip
        others = [", ".join(f"{row['label']} {row['probability']:.1%}" for row in answer["top"][1:])]
        table.add_row(*(Text(cell) for cell in cells + (others if with_others else [])))
    return table


def _unknown(flag: bool | None) -> str:
    return {None: "not known", True: "yes", False: "no"}[flag]
