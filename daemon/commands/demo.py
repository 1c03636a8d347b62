"""`mqmk-daemon demo`: a real daemon learns one task after another before your eyes."""

import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from mqmk.daemon.commands.options import _assignments

if TYPE_CHECKING:
    from rich.console import Console

    from mqmk.daemon.config import Config
    from mqmk.daemon.demo import Demo, View
    from mqmk.daemon.demo_pictures import DemoTask
