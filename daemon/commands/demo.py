"""`mqmk-daemon demo`: a real daemon learns one task after another before your eyes."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from mqmk.daemon.commands.options import assignments_of

if TYPE_CHECKING:
    from rich.console import Console

    from mqmk.daemon.config import Config
    from mqmk.daemon.demo import Demo, View
    from mqmk.daemon.demo_daemon import DemoDaemon
    from mqmk.daemon.demo_pictures import DemoTask

RESULTS = "demo.json"


@dataclass(frozen=True)
class Wishes:
    """What was typed."""

    tasks: int | None
    data: Path | None
    questions: int
    stays: bool
    as_json: bool


@click.command()
@click.option("--tasks", type=click.IntRange(min=1), help="How many tasks.  [default: 10, or as many as --data makes]")
@click.option("--data", type=click.Path(exists=True, path_type=Path, resolve_path=True), metavar="FOLDER",
              help="Your own pictures instead of sketches: FOLDER/CLASS/*.jpg, or what `pack` takes.")  # fmt: skip
@click.option("--backbone", metavar="NAME", help="Same as --set backbone.name=NAME.")
@click.option("--weights", type=click.Path(exists=True, dir_okay=False, resolve_path=True), metavar="FILE",
              help="Same as --set backbone.weights=FILE.")  # fmt: skip
@click.option("--image-size", type=click.IntRange(min=8), metavar="PX", help="Same as --set backbone.image_size=PX.")
@click.option("--set", "assigned", multiple=True, metavar="KEY=VALUE", callback=assignments_of,
              help="One setting of the demo's daemon, such as train.epochs=3; may be repeated.")  # fmt: skip
@click.option("--state", type=click.Path(file_okay=False, path_type=Path, resolve_path=True), metavar="FOLDER",
              help="State directory; it must be new or empty.  [default: a new one beside the user's own]")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65535), help="Of the page and the API.  [default: a free one]")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Of the metrics.  [default: a free one]")
@click.option("--questions", type=click.IntRange(min=1), default=500, show_default=True,
              help="At most this many pictures are asked about after a task.")  # fmt: skip
@click.option("--exit", "leave", is_flag=True, help="End after the last task instead of serving until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end.")
def demo(
    tasks: int | None,
    data: Path | None,
    backbone: str | None,
    weights: str | None,
    image_size: int | None,
    assigned: dict[str, str],
    state: Path | None,
    port: int | None,
    metrics_port: int | None,
    questions: int,
    leave: bool,
    as_json: bool,
) -> None:
    """Start a daemon of its own, drop tasks into its bucket one after another, and ask the service about all of them.

    The tasks are human sketches of classes that the backbone never saw, or --data. Nothing of a configuration file, of
    MQMK_ variables or of a running daemon is touched. Everything it started ends with it; the state directory stays.
    """
    from mqmk.daemon.demo_daemon import free_port

    port = free_port(port)
    given = {
        "serve.port": port,
        "metrics.port": free_port(metrics_port, port),
        "backbone.name": backbone,
        "backbone.weights": weights,
        "backbone.image_size": image_size,
    }
    flags = {name: str(value) for name, value in given.items() if value is not None} | assigned
    _run(flags, state, Wishes(tasks, data, questions, not leave, as_json))


def _run(flags: dict[str, str], state: Path | None, wishes: Wishes) -> None:
    from rich.console import Console

    from mqmk.daemon.config_sources import load
    from mqmk.daemon.demo_daemon import DemoDaemon, typed

    begun, folder = time.monotonic(), _state_folder(state)
    flags["state.dir"] = str(folder)
    config = load(None, environ={}, flags=flags, folder=folder).config
    _check(config)
    console = Console(stderr=wishes.as_json, highlight=False)
    console.print(f"state directory: {folder}", soft_wrap=True)
    with _signals_as_exits():
        try:
            with DemoDaemon(config, flags) as daemon:
                _play(daemon, console, wishes, begun)
        except KeyboardInterrupt:
            console.print("\nstopped before the end", style="yellow")
            raise SystemExit(130) from None
        finally:
            console.print(
                f"The daemon and its Ray are gone; `{typed('mqmk-daemon')} start --state {folder}` goes on from here, "
                f"`rm -r {folder}` forgets it.", soft_wrap=True
            )  # fmt: skip


def _check(config: "Config") -> None:
    from mqmk.daemon.errors import DaemonError

    if not config.serve.enabled or config.ray.address == "none":
        raise DaemonError("a demo asks the service: leave serve.enabled and ray.address as they are")
    if "://" in config.bucket_url:
        raise DaemonError(f"a demo drops tasks into a folder: expected one as bucket.url, got {config.bucket_url}")


def _state_folder(wanted: Path | None) -> Path:
    import os

    from mqmk.daemon.config import state_folder
    from mqmk.daemon.demo_daemon import new_state_folder
    from mqmk.daemon.errors import DaemonError

    if wanted is None:
        return new_state_folder(state_folder(os.environ).parent / "mqmk-demo", f"{datetime.now():%Y-%m-%d-%H%M%S}")
    wanted.mkdir(parents=True, exist_ok=True)
    if any(wanted.iterdir()):
        raise DaemonError(f"{wanted} is not empty, and a demo starts from nothing: choose another --state, or empty it")
    return wanted


def _tasks(config: "Config", wishes: Wishes) -> "list[DemoTask]":
    from mqmk.daemon.demo_pictures import MOST_TASKS, own_tasks, sketch_tasks

    if wishes.data is not None:
        return own_tasks(wishes.data, wishes.tasks, wishes.questions)
    return sketch_tasks(wishes.tasks or MOST_TASKS, config.state.dir / "questions", wishes.questions)


def _play(daemon: "DemoDaemon", console: "Console", wishes: Wishes, begun: float) -> None:
    import shutil

    from mqmk.daemon.demo import Demo  # its seconds of imports pass while the daemon starts

    tasks, scratch = _tasks(daemon.config, wishes), daemon.config.state.dir / "packing"
    with _view(console, tasks, begun) as view:
        demo = Demo(daemon, tasks, scratch, view, begun)
        demo.play()
    shutil.rmtree(scratch)
    _conclude(demo, console, wishes)
    try:
        while wishes.stays:
            daemon.status()
            time.sleep(1)
    except KeyboardInterrupt:
        console.print("\nending the daemon and its Ray")


@contextmanager
def _view(console: "Console", tasks: "list[DemoTask]", begun: float) -> "Iterator[View]":
    from rich.live import Live

    from mqmk.daemon.demo_view import LineView, LiveView

    if not console.is_terminal:
        yield LineView(console, begun)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield LiveView(live, tasks, begun)


def _conclude(demo: "Demo", console: "Console", wishes: Wishes) -> None:
    from mqmk.daemon.demo_view import places, summary

    document, results = demo.document(), demo.daemon.config.state.dir / RESULTS
    text = json.dumps(document, indent=2)
    results.write_text(text)
    for line in summary(demo):
        console.print(line, markup=False)
    for name, place in places(demo, document, str(results)):
        console.print(f"  {name:<8} {place}", markup=False, soft_wrap=True)
    if wishes.as_json:
        click.echo(text)
    if wishes.stays:
        console.print("It goes on serving and learning; Ctrl-C ends it.")


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by the same door as Ctrl-C, so that everything is ended on the way.

    Ctrl-C is asked for, too: who is started in the background by a script does not hear it otherwise. After `nohup`
    the end of the terminal stays ignored.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    doors = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: leave}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        doors[signal.SIGHUP] = leave
    before = [(number, signal.signal(number, door)) for number, door in doors.items()]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
