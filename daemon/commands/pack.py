"""`mqmk-daemon pack`: make task shards and their manifest from a folder of pictures."""

import json
from pathlib import Path

import click


@click.command()
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("dest", type=click.Path(file_okay=False, path_type=Path))
@click.option("--task", required=True, help="Name of the task; its folder under DEST.")
@click.option("--holdout", type=click.FloatRange(0, 1, max_open=True), default=0.2, show_default=True,
              help="Share of the pictures that is never trained on, chosen by their content.")  # fmt: skip
@click.option("--shard-mb", type=click.FloatRange(0, min_open=True), default=256, show_default=True,
              help="Size at which a new shard is begun.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the manifest.")
def pack(source: Path, dest: Path, task: str, holdout: float, shard_mb: float, as_json: bool) -> None:
    """Pack SOURCE into shards under DEST/TASK, the bucket's `tasks` folder.

    SOURCE is a folder of class folders, a Hugging Face style folder with metadata.csv or metadata.jsonl, or a CSV file
    with columns for image and label. TASK.json is written last, so that the daemon sees a whole task or none.
    """
    from rich.console import Console
    from rich.progress import Progress

    from mqmk.learner.pack import pack as pack_task

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task(f"packing {task}", total=None)
        manifest = pack_task(
            source,
            dest,
            task,
            holdout=holdout,
            shard_size=int(shard_mb * 2**20),
            progress=lambda done, total: bar.update(line, completed=done, total=total),
        )
    if as_json:
        click.echo(json.dumps(json.loads(manifest.to_bytes()), indent=2))
    else:
        shards, classes = len(manifest.shards), len(manifest.classes)
        click.echo(f"{dest / task}: {manifest.samples} pictures of {classes} classes in {shards} shard(s)")
