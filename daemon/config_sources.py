"""Where settings come from: defaults, one YAML file, MQMK_* variables, flags; later ones win, and each is remembered.

Every complaint names the key, its source and what is accepted, and all of them are made at once.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqmk.daemon import crash_points
from mqmk.daemon.config import EVERYWHERE, LOOPBACK, Config, State, state_folder
from mqmk.daemon.config_keys import PREFIX, Key, all_keys, built, flat
from mqmk.daemon.errors import ConfigError
from mqmk.daemon.passwords import hidden

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

FILE_NAME: Final = "mqmk.yaml"
FILE_VARIABLE: Final = "MQMK_CONFIG"
KEY_VARIABLE: Final = "MQMK_API_KEY"
"""The key that `predict` and `evaluate` show to a service that asks for one; never in a file or on a command line."""
RESERVED: Final = frozenset({FILE_VARIABLE, KEY_VARIABLE, crash_points.VARIABLE})
"""Variables that are no settings."""
DEFAULT: Final = "default"
COMMAND_LINE: Final = "command line"


@dataclass(frozen=True)
class Given:
    """One value as it was written, and where."""

    name: str
    text: str | None  # None where the file holds something that is no plain value
    source: str
    shown: str  # the name as the user wrote it
    folder: Path  # which relative paths start from


@dataclass(frozen=True)
class Loaded:
    """The configuration, and where every value came from."""

    config: Config
    origins: Mapping[str, str]
    file: Path | None


def load(
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Loaded:
    """The configuration from all sources, or ConfigError with every complaint; `flags` maps dotted keys to text."""
    folder = folder or Path.cwd()
    file = _chosen_file(file, environ, folder)
    given = [*(_in_file(file) if file else ()), *_in_environment(environ, folder), *_in_flags(flags or {}, folder)]
    values = dict(flat(replace(Config(), state=State(state_folder(environ)))))
    origins = dict.fromkeys(values, DEFAULT)
    complaints = []
    for one in given:
        try:
            values[one.name] = _read(one)
            origins[one.name] = one.source
        except ValueError as error:
            complaints.append(str(error))
    config = built(values)
    complaints += [f"{', '.join(f'{key} ({origins[key]})' for key in keys)}: {why}" for keys, why in conflicts(config)]
    if complaints:
        raise ConfigError("\n".join(complaints))
    return Loaded(config, origins, file)


def conflicts(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings that do not go together, and why."""
    if config.bucket.poll_seconds > config.bucket.max_poll_seconds:
        yield ("bucket.poll_seconds", "bucket.max_poll_seconds"), "the first must not be longer than the second"
    if config.retry.first_seconds > config.retry.max_seconds:
        yield ("retry.first_seconds", "retry.max_seconds"), "the first must not be longer than the second"
    if config.serve.enabled and config.serve.port == config.metrics.port != 0:
        yield ("serve.port", "metrics.port"), f"both are {config.serve.port}; expected two different ports"
    if config.ray.address == "none" and config.ray.workers_per_task > 1:
        yield ("ray.address", "ray.workers_per_task"), "several workers for a task need Ray; set one of them back"
    if config.serve.max_replicas is not None and config.serve.max_replicas < config.serve.replicas:
        yield ("serve.replicas", "serve.max_replicas"), "the first must not be larger than the second"
    if config.serve.haproxy and config.ray.address != "local":
        yield ("ray.address", "serve.haproxy"), "HAProxy is started with the local Ray only; set one of them back"
    if config.serve.proxies == "every" and config.serve.host not in (*LOOPBACK, *EVERYWHERE):
        why = f"not every node has the address {config.serve.host}; set serve.host=0.0.0.0"
        yield ("serve.proxies", "serve.host"), why
    if config.backbone.name == "embedded" and config.backbone.weights:
        yield ("backbone.name", "backbone.weights"), "the embedded backbone has its own weights; name another one"
    if config.serve.enabled and config.serve.host not in LOOPBACK and not (config.serve.api_keys or config.serve.open):
        why = f"{config.serve.host} can be reached from elsewhere; give serve.api_keys a file, or set serve.open=true"
        yield ("serve.host", "serve.api_keys"), why


def _chosen_file(file: Path | None, environ: Mapping[str, str], folder: Path) -> Path | None:
    if file:
        return _existing(folder / file.expanduser(), "--config")
    if environ.get(FILE_VARIABLE):
        return _existing(folder / Path(environ[FILE_VARIABLE]).expanduser(), FILE_VARIABLE)
    return folder / FILE_NAME if (folder / FILE_NAME).is_file() else None


def _existing(file: Path, source: str) -> Path:
    if not file.is_file():
        raise ConfigError(f"{source}: expected a YAML file, but there is no file {file}")
    return file


def _read(given: Given) -> object:
    key = all_keys().get(given.name)
    if key is None:
        raise ValueError(f"{given.source}: {_unknown(given)}")
    try:
        if given.text is None:
            raise ValueError("not a plain value")
        return key.read(given.text, given.folder)
    except ValueError:
        got = "something that is no plain value" if given.text is None else hidden(repr(given.text))[:200]
        raise ValueError(f"{given.source}: {_named(given, key)}: expected {key.accepted}, got {got}") from None


def _named(given: Given, key: Key) -> str:
    return key.name if given.shown == given.source else given.shown


def _unknown(given: Given) -> str:
    """The nearest valid name, in the spelling of its source."""
    from difflib import get_close_matches

    spelled = {key.variable if given.shown.startswith(PREFIX) else key.name: key for key in all_keys().values()}
    near = get_close_matches(given.shown, spelled, n=1, cutoff=0.5)
    inside = [name.removeprefix(f"{given.shown}.") for name in spelled if name.startswith(f"{given.shown}.")]
    if inside:
        return f"{given.shown} is a section, not a setting; it holds {', '.join(inside)}"
    hint = f"did you mean {near[0]} ({spelled[near[0]].accepted})?" if near else "`mqmk-daemon config` lists them all"
    return f"there is no setting {given.shown}; {hint}"


def _in_environment(environ: Mapping[str, str], folder: Path) -> Iterator[Given]:
    """An empty variable counts as absent, as compose files write it."""
    names = {key.variable: key.name for key in all_keys().values()}
    for variable, text in sorted(environ.items()):
        if variable.startswith(PREFIX) and variable not in RESERVED and text:
            yield Given(names.get(variable, variable), text, variable, variable, folder)


def _in_flags(flags: Mapping[str, str], folder: Path) -> Iterator[Given]:
    for name, text in flags.items():
        yield Given(name, text, COMMAND_LINE, name, folder)


def _in_file(file: Path) -> Iterator[Given]:
    """Every value of a YAML file. Only its tree is read: no object is ever made from a tag."""
    import yaml

    try:
        tree = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: not a YAML file that can be read: {' '.join(str(error).split())}") from error
    if tree is None:
        return
    if not isinstance(tree, yaml.MappingNode):
        raise ConfigError(f"{file}: expected sections such as `bucket:`, got a single value or a list")
    yield from _in_section(tree, "", file)


def _in_section(section: "MappingNode", prefix: str, file: Path) -> Iterator[Given]:
    import yaml

    seen: dict[str, int] = {}
    for key, value in section.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"{file}:{line}: {name} is given a second time; line {seen[name]} has it already")
        seen[name] = line
        if isinstance(value, yaml.MappingNode) and any(known.startswith(f"{name}.") for known in all_keys()):
            yield from _in_section(value, f"{name}.", file)
        elif not _is_empty_section(name, value):
            yield Given(name, _text(value), f"{file}:{line}", name, file.parent)


def _is_empty_section(name: str, value: "Node") -> bool:
    """`bucket:` with everything below it commented out."""
    return value.value == "" and any(known.startswith(f"{name}.") for known in all_keys())


def _text(value: "Node") -> str | None:
    import yaml

    if (
        value.tag.startswith("!") or "/" in value.tag
    ):  # `!env X`, `!!python/name:x`: somebody expects it to do something
        return None
    if isinstance(value, yaml.ScalarNode):
        return str(value.value)
    if isinstance(value, yaml.SequenceNode) and all(isinstance(one, yaml.ScalarNode) for one in value.value):
        return ",".join(one.value for one in value.value)
    return None
