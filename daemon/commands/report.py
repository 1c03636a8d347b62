"""`mqmk-daemon report`: one page about what was learned and how well."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqmk.daemon.commands.options import config_options

if TYPE_CHECKING:
    from mqmk.daemon.config_sources import Loaded


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Where to write it.  [default: report.html in the state directory]")  # fmt: skip
@config_options
def report(loaded: "Loaded", out: Path | None) -> None:
    """Write one HTML file about the state directory: tasks, versions, matching, forgetting. It loads nothing."""
    from mqmk.daemon.commands.status import opened_ledger
    from mqmk.daemon.report import history_of, report_page

    out = out or loaded.config.state.dir / "report.html"
    with opened_ledger(loaded) as ledger:
        text = report_page(history_of(loaded.config, ledger))
    out.write_text(text, encoding="utf-8")
    click.echo(str(out))
