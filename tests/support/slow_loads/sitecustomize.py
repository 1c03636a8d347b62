"""On PYTHONPATH: the first replica that loads a version takes ten seconds longer.

`SLOW_LOADS` is a folder with one marker file per version, created by the first replica.
"""

import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

SECONDS = 10.0


class SlowLoads(MetaPathFinder):
    """Patches `mqmk.deploy.serving.pools.live_pool` when it is imported."""

    def find_spec(self, name: str, path: Any, _target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "mqmk.deploy.serving.pools.live_pool" else None
        if spec and spec.loader:
            slow_down(spec.loader)
        return spec


def slow_down(loader: Loader) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        load = module.LivePool._load

        def _load(self: Any, pointer: Any) -> Any:
            if is_first(pointer.version):
                time.sleep(SECONDS)
            return load(self, pointer)

        module.LivePool._load = _load

    loader.exec_module = exec_module  # type: ignore[method-assign]


def is_first(version: int) -> bool:
    try:
        Path(os.environ["SLOW_LOADS"], str(version)).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


sys.meta_path.insert(0, SlowLoads())
