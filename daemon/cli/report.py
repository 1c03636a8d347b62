"""`mqmk-daemon report`: an HTML report about tasks, versions and accuracy."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Output file.  [default: report.html in the state directory]")  # fmt: skip
@config_options
def report(loaded: "Loaded", out: Path | None) -> None:
    """Write a self-contained HTML report about the state directory: tasks, versions, matching, forgetting."""
    from mqmk.daemon.cli.state import open_ledger
    from mqmk.daemon.status.html_report import read_history, render_report

    out = out or loaded.config.state.dir / "report.html"
    with open_ledger(loaded) as ledger:
        text = render_report(read_history(loaded.config, ledger))
    out.write_text(text, encoding="utf-8")
    click.echo(str(out))
