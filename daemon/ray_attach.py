"""How this process joins a running Ray: the local head, or a cluster that somebody else runs."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mqmk.daemon.errors import RayError
from mqmk.daemon.ray_head import Head
from mqmk.daemon.ray_probe import speaks_grpc

NAMESPACE: Final = "mqmk"
GCS_SECONDS: Final = "300"
"""Ray ends a process whose GCS is dead for 60 s; who looks after our own head (cluster.py) may need longer."""
DETACH_SECONDS: Final = 60.0
"""Ray needs ten to leave what is dead."""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that somebody else runs (`ray.address`): we attach to it and never stop it."""

    address: str
    token_file: Path | None = None
    """None leaves it to Ray's own settings: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token."""


def attach(
    where: Head | Cluster,
    namespace: str = NAMESPACE,
    deadline_seconds: float = 60.0,
    hopeless: Callable[[], str | None] = lambda: None,
) -> None:
    """Connect this process, anew if it was connected before; RayError if that is not done in time.

    Ray itself would wait for minutes where nobody answers. It connects in a thread: there it cannot be waited for too
    long, and it does not replace our handler of SIGTERM.
    """
    begun = time.monotonic()
    _wait_until_answering(where.address, begun + deadline_seconds)
    if where.token_file is not None:
        _check_token(where.address, where.token_file.read_text().strip(), where.token_file)
    _set_environment(where)
    detach()
    late = f"it answers but did not let us in within {deadline_seconds:.0f} s"
    try:
        wait_for(
            lambda: _connect(where.address, namespace),
            hopeless=lambda: late if time.monotonic() > begun + deadline_seconds else hopeless(),
        )
    except Exception as error:
        raise RayError(f"cannot attach to Ray at {where.address}: {error}") from error
    finally:
        _keep_our_signal_handlers()


def wait_for(call: Callable[[], None], hopeless: Callable[[], str | None], look_seconds: float = 0.5) -> None:
    """Call in a thread, and wait while there is hope; else TimeoutError with the reason.

    Ray's own calls wait for ever for a head that dies under them, or end this process after a minute.
    """
    failure: list[BaseException] = []

    def calling() -> None:
        try:
            call()
        except BaseException as error:  # it is raised again by whoever waits for this thread
            failure.append(error)

    thread = threading.Thread(target=calling, name="ray-call", daemon=True)
    thread.start()
    thread.join(look_seconds)
    while thread.is_alive():
        if reason := hopeless():
            raise TimeoutError(reason)
        thread.join(look_seconds)
    if failure:
        raise failure[0]


def _keep_our_signal_handlers() -> None:
    """Ray put its own handlers in front of ours; behind them, a process that ends on SIGTERM aborts."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            if (handler := signal.getsignal(number)) is not None:
                signal.signal(number, handler)


def detach() -> None:
    """Leave Ray; what is detached there lives on. Harmless when not attached."""
    import ray

    end = time.monotonic() + DETACH_SECONDS
    try:
        wait_for(ray.shutdown, lambda: f"not within {DETACH_SECONDS:g} s" if time.monotonic() > end else None)
    except TimeoutError as error:  # a call to a dead Ray that was given up may still hold its lock
        raise RayError(f"cannot detach from Ray: {error}") from error


def _connect(address: str, namespace: str) -> None:
    import ray

    ray.init(address, namespace=namespace, log_to_driver=False, configure_logging=False)


def _wait_until_answering(address: str, deadline: float) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RayError(f"ray.address must be HOST:PORT of a GCS, such as 10.0.0.5:6379, not {address!r}")
    while not speaks_grpc(int(port), timeout=2.0, host=host.strip("[]")):
        if time.monotonic() > deadline:
            raise RayError(f"nobody answers at {address}: is Ray running there? `mqmk-daemon doctor` looks")
        time.sleep(0.2)


def _check_token(address: str, token: str, token_file: Path) -> None:
    """Ray would go on asking for minutes with a token that is refused."""
    import grpc  # type: ignore[import-untyped]

    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")
        try:
            ask(b"", timeout=10.0, metadata=(("authorization", f"Bearer {token}"),))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise RayError(
                    f"Ray at {address} refuses the token in {token_file}: it belongs to another Ray"
                ) from error
            raise RayError(f"Ray at {address} does not answer: {error.details()}") from error


def _set_environment(where: Head | Cluster) -> None:
    """Ray reads some variables when it is imported and remembers them; make it read ours, imported or not."""
    if where.token_file is not None:
        os.environ.pop("RAY_AUTH_TOKEN", None)  # it would win over the file
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(where.token_file)}
    local = isinstance(where, Head)
    if local:
        os.environ |= {"RAY_gcs_rpc_server_reconnect_timeout_s": GCS_SECONDS}
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0" if local else "1"
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    ray_constants.ENABLE_RAY_CLUSTER = not local  # else Ray takes 127.0.0.1 for the machine's outer address
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    logging.getLogger("ray").setLevel(logging.ERROR)  # a warning tells that a thread cannot handle signals: we know
