"""`mqmk-daemon demo`: watch a real daemon learn one task after another."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shlex import quote
from types import FrameType
from typing import TYPE_CHECKING

import click

from mqmk.daemon.cli.options import parse_assignments

if TYPE_CHECKING:
    from rich.console import Console

    from mqmk.daemon.config.sections import Config
    from mqmk.daemon.demo.daemon import DemoDaemon
    from mqmk.daemon.demo.scenario import Demo, View
    from mqmk.daemon.demo.tasks import DemoTask

RESULTS = "demo.json"


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command."""

    tasks: int | None
    data: Path | None
    images: int
    keeps_serving: bool
    as_json: bool


@click.command()
@click.option("--tasks", type=click.IntRange(min=1), help="Number of tasks.  [default: 10, or as many as --data gives]")
@click.option("--data", type=click.Path(exists=True, path_type=Path, resolve_path=True), metavar="FOLDER",
              help="Your own images instead of sketches: FOLDER/CLASS/*.jpg, or anything `pack` accepts.")  # fmt: skip
@click.option("--backbone", metavar="NAME", help="Same as --set backbone.name=NAME.")
@click.option("--weights", type=click.Path(exists=True, dir_okay=False, resolve_path=True), metavar="FILE",
              help="Same as --set backbone.weights=FILE.")  # fmt: skip
@click.option("--image-size", type=click.IntRange(min=8), metavar="PX", help="Same as --set backbone.image_size=PX.")
@click.option("--set", "assigned", multiple=True, metavar="KEY=VALUE", callback=parse_assignments,
              help="One setting of the demo's daemon, such as train.epochs=3; may be repeated.")  # fmt: skip
@click.option("--state", type=click.Path(file_okay=False, path_type=Path, resolve_path=True), metavar="FOLDER",
              help="State directory; must be new or empty.  [default: a new one beside the user's own]")  # fmt: skip
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the page and the API.  [default: a free one]")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="Port of the metrics.  [default: a free one]")
@click.option("--questions", type=click.IntRange(min=1), default=500, show_default=True,
              help="Maximum number of unseen images to predict after each task.")  # fmt: skip
@click.option("--exit", "leave", is_flag=True, help="Exit after the last task instead of serving until Ctrl-C.")
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
    """Start a separate daemon, drop tasks into its bucket one by one, and classify unseen images of all tasks so far.

    The tasks are human sketches of classes that the backbone never saw, or --data. Configuration files, MQMK_ variables
    and running daemons are left alone. Everything it starts is stopped at the end; the state directory stays.
    """
    from mqmk.daemon.demo.daemon import choose_port

    port = choose_port(port)
    given = {
        "serve.port": port,
        "metrics.port": choose_port(metrics_port, port),
        "backbone.name": backbone,
        "backbone.weights": weights,
        "backbone.image_size": image_size,
    }
    flags = {name: str(value) for name, value in given.items() if value is not None} | assigned
    _run(flags, state, DemoOptions(tasks, data, questions, not leave, as_json))


def _run(flags: dict[str, str], state: Path | None, options: DemoOptions) -> None:
    from rich.console import Console

    from mqmk.daemon.config.load import load
    from mqmk.daemon.demo.daemon import DemoDaemon, command_name

    begun, folder = time.monotonic(), _state_folder(state)
    flags["state.dir"] = str(folder)
    config = load(None, environ={}, flags=flags, folder=folder).config
    _check(config)
    console = Console(stderr=options.as_json, highlight=False)
    console.print(f"state directory: {folder}", soft_wrap=True)
    with _signals_as_exits():
        try:
            with DemoDaemon(config, flags) as daemon:
                _run_demo(daemon, console, options, begun)
        except KeyboardInterrupt:
            console.print("\ninterrupted", style="yellow")
            raise SystemExit(130) from None
        finally:
            place = quote(str(folder))
            resume, delete = f"{command_name('mqmk-daemon')} start --state {place}", f"rm -r {place}"
            console.print(
                f"The daemon and its Ray are stopped. `{resume}` continues from here, `{delete}` deletes everything.",
                soft_wrap=True,
            )


def _check(config: "Config") -> None:
    from mqmk.daemon.errors import DaemonError

    if not config.serve.enabled or config.ray.address == "none":
        raise DaemonError("the demo needs the service: leave serve.enabled and ray.address as they are")
    if "://" in config.bucket_url:
        raise DaemonError(f"the demo drops tasks into a folder: expected one as bucket.url, got {config.bucket_url}")


def _state_folder(wanted: Path | None) -> Path:
    import os

    from mqmk.daemon.config.sections import state_folder
    from mqmk.daemon.demo.daemon import create_state_folder
    from mqmk.daemon.errors import DaemonError

    if wanted is None:
        return create_state_folder(state_folder(os.environ).parent / "mqmk-demo", f"{datetime.now():%Y-%m-%d-%H%M%S}")
    wanted.mkdir(parents=True, exist_ok=True)
    if any(wanted.iterdir()):
        raise DaemonError(f"{wanted} is not empty; the demo starts from scratch: choose another --state, or empty it")
    return wanted


def _tasks(config: "Config", options: DemoOptions) -> "list[DemoTask]":
    from mqmk.daemon.demo.tasks import MAX_TASKS, own_tasks, sketch_tasks

    if options.data is not None:
        return own_tasks(options.data, options.tasks, options.images)
    return sketch_tasks(options.tasks or MAX_TASKS, config.state.dir / "questions", options.images)


def _run_demo(daemon: "DemoDaemon", console: "Console", options: DemoOptions, begun: float) -> None:
    import shutil

    from mqmk.daemon.demo.scenario import Demo  # its imports take seconds, while the daemon starts

    tasks, scratch = _tasks(daemon.config, options), daemon.config.state.dir / "packing"
    with _view(console, tasks, begun) as view:
        demo = Demo(daemon, tasks, scratch, view, begun)
        demo.run()
    shutil.rmtree(scratch)
    _conclude(demo, console, options)
    try:
        while options.keeps_serving:
            daemon.status()
            time.sleep(1)
    except KeyboardInterrupt:
        console.print("\nstopping the daemon and its Ray")


@contextmanager
def _view(console: "Console", tasks: "list[DemoTask]", begun: float) -> "Iterator[View]":
    from rich.live import Live

    from mqmk.daemon.demo.view import LineView, LiveView

    if not console.is_terminal:
        yield LineView(console, begun)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield LiveView(live, tasks, begun)


def _conclude(demo: "Demo", console: "Console", options: DemoOptions) -> None:
    from mqmk.daemon.demo.view import places, summary

    document, results = demo.document(), demo.daemon.config.state.dir / RESULTS
    text = json.dumps(document, indent=2)
    results.write_text(text)
    for line in summary(demo):
        console.print(line, markup=False)
    for name, place in places(demo, document, str(results)):
        console.print(f"  {name:<8} {place}", markup=False, soft_wrap=True)
    if options.as_json:
        click.echo(text)
    if options.keeps_serving:
        console.print("It keeps serving and learning; press Ctrl-C to stop it.")


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit, so that everything is stopped on the way out, as after Ctrl-C.

    The handler of Ctrl-C is set, too: a process that a script starts in the background ignores SIGINT otherwise. After
    `nohup`, SIGHUP stays ignored.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: leave}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = leave
    before = [(number, signal.signal(number, handler)) for number, handler in handlers.items()]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
