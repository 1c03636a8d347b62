"""Loads settings from defaults, one YAML file, MQMK_* variables and flags; later ones win, and origins are kept.

An error lists every problem at once, each with the setting, its source and what is accepted.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqmk.daemon import failpoints
from mqmk.daemon.config.fields import PREFIX, Setting, all_settings, build, flatten
from mqmk.daemon.config.sections import Config, State, state_folder
from mqmk.daemon.errors import ConfigError
from mqmk.daemon.redaction import redact
from mqmk.deploy.serving.settings import is_loopback
from mqmk.matcher.matcher_info import PLAIN_MATCHERS

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

FILE_NAME: Final = "mqmk.yaml"
FILE_VARIABLE: Final = "MQMK_CONFIG"
API_KEY_VARIABLE: Final = "MQMK_API_KEY"
"""The API key of `predict` and `evaluate`; never in a file or on a command line."""
RESERVED: Final = frozenset({FILE_VARIABLE, API_KEY_VARIABLE, failpoints.VARIABLE})
"""Variables that are not settings."""
SERVICE_LINK: Final = re.compile(
    r".*_SERVICE_HOST|.*_SERVICE_PORT(_.+)?|.*_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)
"""What Kubernetes sets in every pod for each service of its namespace, such as one called mqmk."""
DEFAULT: Final = "default"
COMMAND_LINE: Final = "command line"


@dataclass(frozen=True)
class Given:
    """One value as the user wrote it, and where."""

    name: str
    text: str | None  # None if the file contains something that is not a plain value
    source: str
    spelling: str  # the name as the user wrote it
    folder: Path  # that relative paths start from


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
    """The configuration from all sources; ConfigError lists every problem. `flags` maps dotted names to text."""
    folder = folder or Path.cwd()
    file = _choose_file(file, environ, folder)
    given = [
        *(_read_file(file) if file else ()),
        *_read_environment(environ, folder),
        *_read_flags(flags or {}, folder),
    ]
    values = dict(flatten(replace(Config(), state=State(state_folder(environ)))))
    origins = dict.fromkeys(values, DEFAULT)
    problems = []
    for one in given:
        try:
            values[one.name] = _parse(one)
            origins[one.name] = one.source
        except ValueError as error:
            problems.append(str(error))
    config = build(values)
    problems += [f"{', '.join(f'{key} ({origins[key]})' for key in keys)}: {why}" for keys, why in conflicts(config)]
    if problems:
        raise ConfigError("\n".join(problems))
    return Loaded(config, origins, file)


def conflicts(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Settings that conflict with each other, and why."""
    if config.bucket.poll_seconds > config.bucket.max_poll_seconds:
        yield ("bucket.poll_seconds", "bucket.max_poll_seconds"), "the first must not be longer than the second"
    if config.retry.first_seconds > config.retry.max_seconds:
        yield ("retry.first_seconds", "retry.max_seconds"), "the first must not be longer than the second"
    if config.serve.enabled and config.serve.port == config.metrics.port != 0:
        yield ("serve.port", "metrics.port"), f"both are {config.serve.port}; expected two different ports"
    if config.ray.address == "none" and config.ray.workers_per_task > 1:
        yield ("ray.address", "ray.workers_per_task"), "several workers per task need Ray; change one of them"
    if config.serve.max_replicas is not None and config.serve.max_replicas < config.serve.replicas:
        yield ("serve.replicas", "serve.max_replicas"), "the first must not be larger than the second"
    if config.serve.haproxy and config.ray.address != "local":
        yield ("ray.address", "serve.haproxy"), "HAProxy needs the local Ray; change one of them"
    if config.serve.proxies == "every" and not (is_loopback(config.serve.host) or config.serve.listens_everywhere):
        why = f"not every node has the address {config.serve.host}; set serve.host=0.0.0.0"
        yield ("serve.proxies", "serve.host"), why
    if config.train.g_prompt == "always":
        why = "every task would change the answers of all earlier ones; only `mqmk-daemon bench accuracy` supports it"
        yield ("train.g_prompt",), why
    for name, matchers in (("evaluate.matchers", config.evaluate.matchers), ("serve.matcher", (config.serve.matcher,))):
        if needed := [] if config.train.plain_means else [each for each in matchers if each in PLAIN_MATCHERS]:
            why = f"{' and '.join(needed)} need the means that the first one disables; change one of them"
            yield ("train.plain_means", name), why
    if config.backbone.name == "embedded" and config.backbone.weights:
        yield (
            ("backbone.name", "backbone.weights"),
            "the embedded backbone has its own weights; set another backbone.name",
        )
    if config.serve.enabled and config.serve.needs_api_keys:
        why = f"{config.serve.host} is reachable from other machines; set serve.api_keys to a file, or serve.open=true"
        yield ("serve.host", "serve.api_keys"), why


def _choose_file(file: Path | None, environ: Mapping[str, str], folder: Path) -> Path | None:
    if file:
        return _require_file(folder / file.expanduser(), "--config")
    if environ.get(FILE_VARIABLE):
        return _require_file(folder / Path(environ[FILE_VARIABLE]).expanduser(), FILE_VARIABLE)
    return folder / FILE_NAME if (folder / FILE_NAME).is_file() else None


def _require_file(file: Path, source: str) -> Path:
    if not file.is_file():
        raise ConfigError(f"{source}: expected a YAML file, but {file} does not exist")
    return file


def _parse(given: Given) -> object:
    key = all_settings().get(given.name)
    if key is None:
        raise ValueError(f"{given.source}: {_describe_unknown(given)}")
    try:
        if given.text is None:
            raise ValueError("not a plain value")
        return key.parse(given.text, given.folder)
    except ValueError:
        got = "something that is not a plain value" if given.text is None else redact(repr(given.text))[:200]
        raise ValueError(f"{given.source}: {_label(given, key)}: expected {key.accepted}, got {got}") from None


def _label(given: Given, key: Setting) -> str:
    return key.name if given.spelling == given.source else given.spelling


def _describe_unknown(given: Given) -> str:
    """The nearest valid name, in the spelling of its source."""
    from difflib import get_close_matches

    spelled = {key.variable if given.spelling.startswith(PREFIX) else key.name: key for key in all_settings().values()}
    near = get_close_matches(given.spelling, spelled, n=1, cutoff=0.5)
    inside = [name.removeprefix(f"{given.spelling}.") for name in spelled if name.startswith(f"{given.spelling}.")]
    if inside:
        return f"{given.spelling} is a section, not a setting; it contains {', '.join(inside)}"
    hint = f"did you mean {near[0]} ({spelled[near[0]].accepted})?" if near else "`mqmk-daemon config` lists them all"
    return f"there is no setting {given.spelling}; {hint}"


def _read_environment(environ: Mapping[str, str], folder: Path) -> Iterator[Given]:
    """An empty variable counts as absent, as in compose files."""
    names = {key.variable: key.name for key in all_settings().values()}
    for variable, text in sorted(environ.items()):
        if variable.startswith(PREFIX) and variable not in RESERVED and text and not _is_service_link(variable, text):
            yield Given(names.get(variable, variable), text, variable, variable, folder)


def _is_service_link(variable: str, text: str) -> bool:
    """Also by its value, where the name is that of a setting: `tcp://10.0.0.1:80` is not the port of a setting."""
    return bool(SERVICE_LINK.fullmatch(variable)) or re.match(r"(tcp|udp|sctp)://", text) is not None


def _read_flags(flags: Mapping[str, str], folder: Path) -> Iterator[Given]:
    for name, text in flags.items():
        yield Given(name, text, COMMAND_LINE, name, folder)


def _read_file(file: Path) -> Iterator[Given]:
    """Every value of a YAML file. Only the node tree is read: no object is ever constructed from a tag."""
    import yaml

    try:
        tree = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: not a readable YAML file: {' '.join(str(error).split())}") from error
    if tree is None:
        return
    if not isinstance(tree, yaml.MappingNode):
        raise ConfigError(f"{file}: expected sections such as `bucket:`, got a single value or a list")
    yield from _read_section(tree, "", file)


def _read_section(section: "MappingNode", prefix: str, file: Path) -> Iterator[Given]:
    import yaml

    seen: dict[str, int] = {}
    for key, value in section.value:
        name, line = f"{prefix}{key.value}", key.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"{file}:{line}: {name} is given twice; line {seen[name]} already has it")
        seen[name] = line
        if isinstance(value, yaml.MappingNode) and any(known.startswith(f"{name}.") for known in all_settings()):
            yield from _read_section(value, f"{name}.", file)
        elif not _is_empty_section(name, value):
            yield Given(name, _text(value), f"{file}:{line}", name, file.parent)


def _is_empty_section(name: str, value: "Node") -> bool:
    """`bucket:` with everything below it commented out."""
    return value.value == "" and any(known.startswith(f"{name}.") for known in all_settings())


def _text(value: "Node") -> str | None:
    import yaml

    if (
        value.tag.startswith("!") or "/" in value.tag
    ):  # `!env X`, `!!python/name:x`: the user expects it to do something
        return None
    if isinstance(value, yaml.ScalarNode):
        return str(value.value)
    if isinstance(value, yaml.SequenceNode) and all(isinstance(one, yaml.ScalarNode) for one in value.value):
        return ",".join(one.value for one in value.value)
    return None
