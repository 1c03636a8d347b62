"""A ServiceSpec from keywords: each is a field of the spec or of its ServeSettings."""

from dataclasses import fields, replace
from pathlib import Path

from mqmk.deploy.serving.settings import ServeSettings, ServiceSpec

_SERVE = {field.name for field in fields(ServeSettings)}


def spec_of(pools: Path, **changes: object) -> ServiceSpec:
    """The default spec of a pool store, changed."""
    return changed(ServiceSpec(pools), **changes)


def changed(spec: ServiceSpec, **changes: object) -> ServiceSpec:
    """Another spec."""
    serve = {name: value for name, value in changes.items() if name in _SERVE}
    rest = {name: value for name, value in changes.items() if name not in _SERVE}
    return replace(spec, serve=replace(spec.serve, **serve), **rest)
