"""The options that every command with a configuration shares: --config, --set and --state."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Result = TypeVar("Result")


def config_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Adds the options, and hands the command the keyword `loaded`: a config_sources.Loaded."""

    @click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE",
                  help="YAML file with settings. [default: $MQMK_CONFIG, or ./mqmk.yaml if there is one]")  # fmt: skip
    @click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", callback=assignments_of,
                  help="One setting, such as train.epochs=3; may be repeated. See `mqmk-daemon config`.")  # fmt: skip
    @click.option("--state", type=click.Path(file_okay=False), metavar="FOLDER", help="Same as --set state.dir=FOLDER.")
    @functools.wraps(command)
    def with_config(
        *arguments: Any, config_file: Path | None, assignments: dict[str, str], state: str | None, **options: Any
    ) -> Result:
        from mqmk.daemon.config_sources import load

        flags = assignments if state is None else {**assignments, "state.dir": state}
        return command(*arguments, loaded=load(config_file, flags=flags), **options)

    return with_config


def assignments_of(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    for one in given:
        if "=" not in one:
            raise click.BadParameter(f"expected KEY=VALUE, such as train.epochs=3, got {one!r}")
    return {key.strip(): value for key, _, value in (one.partition("=") for one in given)}
