"""How this process connects to a running Ray: the local head, or an external cluster."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from mqmk.daemon.errors import RayError
from mqmk.daemon.ray_runtime.head import Head
from mqmk.daemon.ray_runtime.probe import speaks_grpc

NAMESPACE: Final = "mqmk"
GCS_SECONDS: Final = "300"
"""Ray ends a process whose GCS has been dead for 60 s; repairing our own head (cluster.py) may take longer."""
DETACH_SECONDS: Final = 60.0
"""Ray takes ten to disconnect from a dead cluster."""

T = TypeVar("T")
AbortCheck = Callable[[], None]
"""Raises GivenUpError once the call was given up."""


@dataclass(frozen=True)
class ExternalCluster:
    """A Ray cluster that we attach to and never stop (`ray.address`)."""

    address: str
    token_file: Path | None = None
    """None leaves it to Ray's own settings: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token."""


def attach(
    where: Head | ExternalCluster,
    namespace: str = NAMESPACE,
    deadline_seconds: float = 60.0,
    give_up: Callable[[], str | None] = lambda: None,
) -> None:
    """Connect this process, or reconnect it; RayError if that takes too long.

    Ray itself would wait for minutes if nothing answers. It connects in a thread: we can stop waiting for it there, and
    it does not replace our SIGTERM handler.
    """
    begun = time.monotonic()
    _wait_for_gcs(where.address, begun + deadline_seconds)
    if where.token_file is not None:
        _check_token(where.address, where.token_file.read_text().strip(), where.token_file)
    _set_environment(where)
    detach()
    late = f"it answers but did not accept us within {deadline_seconds:.0f} s"
    try:
        run_until(
            lambda _: _connect(where.address, namespace),
            give_up=lambda: late if time.monotonic() > begun + deadline_seconds else give_up(),
        )
    except Exception as error:
        raise RayError(f"cannot attach to Ray at {where.address}: {error}") from error
    finally:
        _restore_signal_handlers()


class GivenUpError(Exception):
    """This call was given up and must end."""


class Call(Generic[T]):
    """A call in its own thread: Ray's calls hang if the head dies meanwhile.

    Nothing can end such a thread, and it may wake up on the next connection, because Ray's connection is global. So
    `work` calls its argument before each step, which raises once the call was given up; and it returns what it created
    instead of storing it.
    """

    def __init__(self, work: Callable[[AbortCheck], T]) -> None:
        self._work, self._found, self._given_up = work, Future[T](), False
        threading.Thread(target=self._run, name="ray-call", daemon=True).start()

    def is_done(self, seconds: float = 0.0) -> bool:
        """Whether it has returned or raised; waits up to this long."""
        return bool(wait([self._found], seconds).done)

    def result(self) -> T:
        """What it returned; raises what it raised."""
        return self._found.result()

    @property
    def succeeded(self) -> bool:
        """Whether it has returned."""
        return self._found.done() and self._found.exception() is None

    def give_up(self) -> None:
        """Make it end before its next step."""
        self._given_up = True

    def _run(self) -> None:
        try:
            self._found.set_result(self._work(self._check_given_up))
        except BaseException as error:  # raised again by result()
            self._found.set_exception(error)

    def _check_given_up(self) -> None:
        if self._given_up:
            raise GivenUpError


def run_until(work: Callable[[AbortCheck], T], give_up: Callable[[], str | None], poll_seconds: float = 0.5) -> T:
    """Call `work` in a thread and wait for it; TimeoutError as soon as `give_up` returns a reason."""
    call = Call(work)
    while not call.is_done(poll_seconds):
        if reason := give_up():
            call.give_up()
            raise TimeoutError(reason)
    return call.result()


def _restore_signal_handlers() -> None:
    """Ray puts its own handlers in front of ours, with which a process that exits on SIGTERM aborts."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def detach() -> None:
    """Disconnect; detached actors live on. Does nothing if not attached."""
    import ray

    end = time.monotonic() + DETACH_SECONDS
    try:
        run_until(
            lambda _: ray.shutdown(),
            lambda: f"no answer within {DETACH_SECONDS:g} s" if time.monotonic() > end else None,
        )
    except TimeoutError as error:  # a call that was given up may still hold Ray's lock
        raise RayError(f"cannot detach from Ray: {error}") from error


def _connect(address: str, namespace: str) -> None:
    import ray

    ray.init(address, namespace=namespace, log_to_driver=False, configure_logging=False)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of a `ray.address`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RayError(f"ray.address must be HOST:PORT of a GCS, such as 10.0.0.5:6379, not {address!r}")
    return host.strip("[]"), int(port)


def _wait_for_gcs(address: str, deadline: float) -> None:
    host, port = split_address(address)
    while not speaks_grpc(port, timeout=2.0, host=host):
        if time.monotonic() > deadline:
            raise RayError(f"nothing answers at {address}: is Ray running there? `mqmk-daemon doctor` checks")
        time.sleep(0.2)


def _check_token(address: str, token: str, token_file: Path) -> None:
    """With a token that is refused, Ray would retry for minutes."""
    import grpc  # type: ignore[import-untyped]

    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            ask(b"", timeout=10.0, metadata=(("authorization", f"Bearer {token}"),))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise RayError(
                    f"Ray at {address} refuses the token in {token_file}: it belongs to another cluster"
                ) from error
            raise RayError(f"Ray at {address} does not answer: {error.details()}") from error


def _set_environment(where: Head | ExternalCluster) -> None:
    """Ray reads some variables once, at import; make it read ours even if it was imported before."""
    if where.token_file is not None:
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would take precedence over the file
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(where.token_file)}
    local = isinstance(where, Head)
    if local:
        os.environ |= {"RAY_gcs_rpc_server_reconnect_timeout_s": GCS_SECONDS}
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0" if local else "1"
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    ray_constants.ENABLE_RAY_CLUSTER = not local  # else Ray replaces 127.0.0.1 by the machine's external address
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    logging.getLogger("ray").setLevel(logging.ERROR)  # hides the warning that a thread cannot handle signals
