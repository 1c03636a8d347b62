"""The options of every command that reads the configuration: --config, --set and --state."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from mqmk.daemon.config.load import Loaded
    from mqmk.daemon.config.sections import Config

Result = TypeVar("Result")


class TaskName(click.ParamType[str]):
    """A name that the ledger can store: a shell passes any bytes on."""

    name = "name"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode()
        except UnicodeEncodeError:
            self.fail(f"expected a name, got {value!a}", param, ctx)
        return value


def config_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Adds the options, and passes the command `loaded`, a config.load.Loaded.

    A --state in which no daemon has run is an error: a typo must not look like an empty, healthy daemon.
    """

    @functools.wraps(command)
    def with_known_state(*arguments: Any, loaded: "Loaded", **options: Any) -> Result:
        if click.get_current_context().params.get("state") is not None:
            require_ledger(loaded.config)
        return command(*arguments, loaded=loaded, **options)

    return new_state_options(with_known_state)


def new_state_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """The same for commands that accept a --state in which no daemon has run."""

    @click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE",
                  help="YAML file with settings. [default: $MQMK_CONFIG, or ./mqmk.yaml if it exists]")  # fmt: skip
    @click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE", callback=parse_assignments,
                  help="A setting, such as train.epochs=3; may be repeated. See `mqmk-daemon config`.")  # fmt: skip
    @click.option("--state", type=click.Path(file_okay=False), metavar="FOLDER", help="Same as --set state.dir=FOLDER.")
    @functools.wraps(command)
    def with_config(
        *arguments: Any, config_file: Path | None, assignments: dict[str, str], state: str | None, **options: Any
    ) -> Result:
        from mqmk.daemon.config.load import load

        flags = assignments if state is None else {**assignments, "state.dir": state}
        return command(*arguments, loaded=load(config_file, flags=flags), **options)

    return with_config


def require_ledger(config: "Config") -> None:
    """DaemonError if no daemon has ever run in the state directory; nothing is created."""
    from mqmk.daemon.errors import DaemonError
    from mqmk.daemon.words import command

    if not config.ledger_file.exists():
        folder = config.state.dir
        raise DaemonError(f"no daemon has run in {folder}; {command('start', '--state', folder)} creates it")


def parse_assignments(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """`KEY=VALUE` options as a mapping."""
    for one in given:
        if "=" not in one:
            raise click.BadParameter(f"expected KEY=VALUE, such as train.epochs=3, got {one!r}")
    return {key.strip(): value for key, _, value in (one.partition("=") for one in given)}
