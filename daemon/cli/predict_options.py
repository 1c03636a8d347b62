"""What `predict` and `evaluate` share: which pool predicts, with which options, and a progress bar."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mqmk.daemon.cli.options import config_options
from mqmk.matcher.matcher_info import AUTO, SERVABLE_MATCHERS

if TYPE_CHECKING:
    from mqmk.daemon.client.predictor import PredictionResult, PredictOptions, Predictor
    from mqmk.daemon.config.load import Loaded

Result = TypeVar("Result")
MATCHERS = (AUTO, *SERVABLE_MATCHERS)


def predict_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Adds the options, and passes the command `open_predictor`: a function from PredictOptions to a Predictor."""

    @click.option("--url", metavar="URL", help="URL of the service.  [default: that of the state directory]")
    @click.option("--local", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
                  help="Use a pool on disk: an exported version, or the current one of a state directory.")  # fmt: skip
    @click.option("--matcher", type=click.Choice(MATCHERS), help="Matcher to use.  [default: as configured]")
    @config_options
    @functools.wraps(command)
    def with_predictor(
        *arguments: Any, loaded: "Loaded", url: str | None, local: Path | None, **options: Any
    ) -> Result:
        if url and local:
            raise click.UsageError("--url and --local are mutually exclusive")
        return command(*arguments, open_predictor=functools.partial(_open_predictor, loaded, url, local), **options)

    return with_predictor


def _open_predictor(loaded: "Loaded", url: str | None, local: Path | None, options: "PredictOptions") -> "Predictor":
    from mqmk.daemon.config.load import API_KEY_VARIABLE, DEFAULT

    if local:
        from mqmk.daemon.client.local_predictor import open_pool

        return open_pool(local, loaded.config, options, own_backbone=loaded.origins["backbone.name"] == DEFAULT)
    from mqmk.daemon.client.http import HttpClient
    from mqmk.daemon.client.http_predictor import HttpPredictor
    from mqmk.daemon.status.snapshot import service_url

    client = HttpClient(url or service_url(loaded.config), os.environ.get(API_KEY_VARIABLE))
    return HttpPredictor(client, options)


def predict_files(predictor: "Predictor", files: "Sequence[Path]") -> "list[PredictionResult]":
    """The result for every file; with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    results, console = [], Console(stderr=True)
    with Progress(console=console, transient=True, disable=len(files) < 2 or not console.is_terminal) as bar:
        line = bar.add_task("predicting", total=len(files))
        for each in predictor.predict(files):
            results.append(each)
            bar.advance(line)
    return results


def list_errors(results: "Sequence[PredictionResult]") -> None:
    """Print why images got no answer, one line each."""
    for each in results:
        if each.error is not None:
            click.echo(f"{each.file}: {each.error}", err=True)
