"""`mqmk-daemon evaluate`: accuracy on labelled images."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.cli.predict_options import list_errors, predict_files, predict_options
from mqmk.daemon.cli.tables import new_table, print_whole

if TYPE_CHECKING:
    from rich.table import Table

    from mqmk.daemon.client.predictor import PredictionResult, PredictOptions, Predictor
    from mqmk.daemon.client.scoring import ClassScore, Confusion, Score

MAX_ROWS = 30
"""Classes in the table, the least accurate ones."""
MAX_CONFUSIONS = 10


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Also write an HTML page, with thumbnails of the most confident mistakes.")  # fmt: skip
@predict_options
def evaluate(
    open_predictor: "Callable[[PredictOptions], Predictor]",
    folder: Path,
    matcher: str | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Measure accuracy on the labelled images FOLDER/CLASS/*. Exits with 1 if an image got no answer.

    Name the classes as they were learned. Classes that were not learned are reported separately: how many of their
    images are flagged as unknown. Use images that were not in the bucket.
    """
    from mqmk.daemon.client.image_files import class_folders
    from mqmk.daemon.client.predictor import PredictOptions
    from mqmk.daemon.client.scoring import find_owners, score_results

    classes = class_folders(folder)
    predictor = open_predictor(PredictOptions(matcher, 1))
    owners = find_owners(classes, predictor.tasks())
    results = predict_files(predictor, [file for files in classes.values() for file in files])
    score = score_results(classes, owners, results)
    if html:
        from mqmk.daemon.client.evaluation_page import render_evaluation

        html.write_text(render_evaluation(predictor.place, score), encoding="utf-8")
        click.echo(f"report: {html}", err=True)
    if as_json:
        click.echo(json.dumps(_document(predictor, score, results), indent=2))
    else:
        _print(score)
        list_errors(results)
    raise SystemExit(int(any(each.error is not None for each in results)))


def _document(predictor: "Predictor", score: "Score", results: "Sequence[PredictionResult]") -> dict[str, Any]:
    figures = ("images", "accuracy", "accuracy_by_class", "matching_rate", "calibration_error", "unknown_share")
    rates = ("accuracy", "matching_rate", "unknown_share")
    return {
        "asked": predictor.place,
        "pool_versions": list(score.versions),
        "matchers": list(score.matchers),
        **{name: getattr(score, name) for name in figures},
        "classes": [asdict(each) | {name: getattr(each, name) for name in rates} for each in score.worst_first],
        "confusions": [asdict(each) for each in score.confusions],
        "mistakes": [asdict(each) | {"file": str(each.file)} for each in score.mistakes],
        "errors": [{"file": str(each.file), "error": each.error} for each in results if each.error is not None],
    }


def _print(score: "Score") -> None:
    from rich.text import Text

    numbers, others = ("images", "right", "matched", "unknown"), "most often mistaken for"
    table = new_table("class", "task", *numbers, others, fold=("class", "task", others), right=numbers)
    for each in score.worst_first[:MAX_ROWS]:
        task = ", ".join(each.tasks) or "not learned"
        shares = [_share(each.accuracy), _share(each.matching_rate), _share(each.unknown_share)]
        table.add_row(*map(Text, (each.label, task, str(each.images), *shares, each.mistaken_for or "")))
    print_whole(table)
    if len(score.classes) > MAX_ROWS:
        click.echo(f"… and {len(score.classes) - MAX_ROWS} more accurate classes, which --json lists")
    if score.confusions:
        print_whole(_confusion_table(score.confusions[:MAX_CONFUSIONS]))
    for line in _summarize(score):
        click.echo(line)


def _confusion_table(confusions: "Sequence[Confusion]") -> "Table":
    from rich.text import Text

    names = ("most frequent confusions", "answered as")
    table = new_table(*names, "images", fold=names, right=("images",))
    for each in confusions:
        table.add_row(Text(each.label), Text(each.answered), str(each.images))
    return table


def _summarize(score: "Score") -> list[str]:
    from mqmk.daemon.status.figures import Share
    from mqmk.daemon.words import plural

    versions, matchers = ", ".join(map(str, score.versions)), ", ".join(score.matchers)
    line = "no image of a class that was learned"
    if score.accuracy is not None and score.matching_rate is not None:
        line = (
            f"accuracy {Share(score.accuracy, score.images)}, {score.accuracy_by_class:.1%} as the mean over "
            f"{plural(len(score.learned), 'class', 'classes')}, matching rate "
            f"{Share(score.matching_rate, score.images).cell()}, calibration error "
            f"{_share(score.calibration_error)}, flagged as unknown {_share(score.unknown_share) or 'not available'}"
        )
    lines = [f"{line}; version {versions}, {matchers}"]
    return lines + ([_summarize_unlearned(score.unlearned)] if score.unlearned else [])


def _summarize_unlearned(classes: "Sequence[ClassScore]") -> str:
    from mqmk.daemon.client.scoring import unknown_share

    share = _share(unknown_share(classes)) or "an unknown share"
    images = sum(each.images for each in classes)
    return f"of {images} images of classes that were not learned, {share} were flagged as unknown"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
