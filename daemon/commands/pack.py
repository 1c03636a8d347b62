"""`mqmk-daemon pack`: make task shards and their manifest from a folder of pictures."""

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqmk.daemon.bucket_store import local_folder

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("dest")
@click.option("--task", required=True, help="Name of the task; its folder under DEST.")
@click.option("--holdout", type=click.FloatRange(0, 1, max_open=True), default=0.2, show_default=True,
              help="Share of the pictures that is never trained on, chosen by their content.")  # fmt: skip
@click.option("--shard-mb", type=click.FloatRange(0, min_open=True), default=256, show_default=True,
              help="Size at which a new shard is begun.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
def pack(source: Path, dest: str, task: str, holdout: float, shard_mb: float, as_json: bool) -> None:
    """Pack SOURCE into shards under DEST/TASK, the bucket's `tasks` folder.

    SOURCE is a folder of class folders, a Hugging Face style folder with metadata.csv or metadata.jsonl, or a CSV file
    with columns for image and label. DEST is a folder, or a URL such as s3://bucket/tasks. The daemon sees a whole task
    or none.
    """
    from rich.console import Console
    from rich.progress import Progress

    from mqmk.learner.pack import pack as pack_task

    console, folder = Console(stderr=True), local_folder(dest)
    if folder is not None and folder.is_file():
        raise click.BadParameter(f"expected a folder or a URL, {dest} is a file", param_hint="DEST")
    packed = partial(pack_task, source, task=task, holdout=holdout, shard_size=int(shard_mb * 2**20))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        packing = partial(_advance, bar, bar.add_task(f"packing {task}", total=None))
        if folder is not None:
            manifest = packed(folder, progress=packing)
        else:
            from mqmk.daemon.bucket_upload import expect_free, upload

            room = expect_free(dest, task)
            with tempfile.TemporaryDirectory(prefix="mqmk-pack-") as part:
                manifest = packed(Path(part), progress=packing)
                sending = partial(_advance, bar, bar.add_task(f"sending {task}", total=None))
                upload(room, Path(part) / task, sending)
    if as_json:
        click.echo(json.dumps(json.loads(manifest.to_bytes()), indent=2))
    else:
        shards, classes = len(manifest.shards), len(manifest.classes)
        place = folder / task if folder is not None else f"{dest.rstrip('/')}/{task}"
        click.echo(f"{place}: {manifest.samples} pictures of {classes} classes in {shards} shard(s)")


def _advance(bar: "Progress", line: "TaskID", done: int, total: int) -> None:
    bar.update(line, completed=done, total=total)
