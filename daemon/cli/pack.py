"""`mqmk-daemon pack`: pack a folder of images into task shards with a manifest."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from mqmk.daemon.bucket.store import local_folder
from mqmk.daemon.words import plural
from mqmk.matcher.image_formats import EXTRA

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from mqmk.learner.data.pack import Packed

SHOWN: Final = 50  # classes in the table


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("dest")
@click.option("--task", required=True, help="Name of the task, and of its folder under DEST.")
@click.option("--holdout", type=click.FloatRange(0, 1, max_open=True), default=0.2, show_default=True,
              help="Share of each class's images that are held out of training, chosen by content.")  # fmt: skip
@click.option("--shard-mb", type=click.FloatRange(0, min_open=True), default=256, show_default=True,
              help="Maximum size of a shard.")  # fmt: skip
@click.option("--skip-bad", is_flag=True, help="Skip files that cannot be packed instead of failing.")
@click.option("--format", "formats", multiple=True, type=click.Choice(EXTRA),
              help="Also pack images of this format; the daemon needs it in limits.formats.")  # fmt: skip
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON document: manifest, images per class, skipped files, warnings.",
)
def pack(
    source: Path, dest: str, task: str, holdout: float, shard_mb: float, skip_bad: bool, formats: tuple[str, ...],
    as_json: bool
) -> None:  # fmt: skip
    """Pack SOURCE into shards under DEST/TASK, the bucket's `tasks` folder.

    SOURCE is a folder of class folders, a Hugging Face style folder with metadata.csv or metadata.jsonl, or a CSV file
    with columns for image and label. DEST is a folder, or a URL such as s3://bucket/tasks. The daemon sees the task
    only when it is complete. Prints the number of images of each class.
    """
    from rich.console import Console
    from rich.progress import Progress

    from mqmk.learner.data.pack import pack_images
    from mqmk.learner.settings import ShardLimits

    console, folder = Console(stderr=True), local_folder(dest)
    if folder is not None and folder.is_file():
        raise click.BadParameter(f"expected a folder or a URL, {dest} is a file", param_hint="DEST")
    limits = ShardLimits(formats=formats or None)  # type: ignore[arg-type]
    made = partial(pack_images, source, task=task, holdout=holdout, shard_size=int(shard_mb * 2**20),
                   skip_bad=skip_bad, limits=limits)  # fmt: skip
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        packing = partial(_advance, bar, bar.add_task(f"packing {task}", total=None))
        if folder is not None:
            packed = made(folder, progress=packing)
        else:
            from mqmk.daemon.bucket.upload import require_free, upload

            room = require_free(dest, task)
            with tempfile.TemporaryDirectory(prefix="mqmk-pack-") as part:
                packed = made(Path(part), progress=packing)
                sending = partial(_advance, bar, bar.add_task(f"sending {task}", total=None))
                upload(room, Path(part) / task, sending)
    if as_json:
        click.echo(json.dumps(_document(packed), indent=2))
        return
    _print(packed)
    place = folder / task if folder is not None else f"{dest.rstrip('/')}/{task}"
    counted = plural(packed.manifest.samples, "image"), plural(len(packed.counts), "class", "classes")
    click.echo(f"{place}: {counted[0]} of {counted[1]} in {plural(len(packed.manifest.shards), 'shard')}")


def _document(packed: "Packed") -> dict[str, Any]:
    """The manifest, and what is not in it."""
    return json.loads(packed.manifest.to_bytes()) | {
        "counts": dict(packed.counts),
        "skipped": [{"path": str(each.path), "reason": each.reason} for each in packed.skipped],
        "warnings": [*packed.warnings],
    }


def _print(packed: "Packed") -> None:
    """Classes with their number of images; skipped files and warnings on standard error."""
    for each in packed.skipped:
        click.echo(f"skipped {each.path}: {each.reason}", err=True)
    if packed.skipped:
        click.echo(f"{plural(len(packed.skipped), 'file')} skipped", err=True)
    for warning in packed.warnings:
        click.echo(f"warning: {warning}", err=True)
    for name, count in [*packed.counts.items()][:SHOWN]:
        click.echo(f"{count:>8,}  {name}")
    if len(packed.counts) > SHOWN:
        click.echo(f"          and {len(packed.counts) - SHOWN:,} more (--json lists all)")


def _advance(bar: "Progress", line: "TaskID", done: int, total: int) -> None:
    bar.update(line, completed=done, total=total)
