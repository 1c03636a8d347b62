"""A TCP proxy that is slow, resets, stalls or truncates connections: asyncio on loopback, in a thread.

with FlakyProxy(server_port, {"slow": 0.3, "reset": 0.1}, seed=0) as proxy:
    ...  # clients connect to proxy.port; each connection draws a fault, which occurs after some thousand bytes
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, Self

MAX_BYTES: Final = 20_000  # of a response, before the fault occurs
SECONDS: Final = 0.1  # delay of a slow connection for every 16 kB, in both directions: 0.16 MB/s


class FlakyProxy:
    """Faults: `slow` (delayed chunks), `reset` (RST), `truncate` (premature end), `blackhole` (no more data)."""

    def __init__(self, port: int, fault_rates: Mapping[str, float], seed: int = 0) -> None:
        self._target, self._fault_rates, self._rng = port, dict(fault_rates), random.Random(seed)
        # Each fault once, `slow` last: clients reuse a working connection and would never meet the others.
        self._first = sorted(fault_rates, key=lambda fault: fault == "slow")
        self.counts: Counter[str] = Counter()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """The URL for clients."""
        return f"http://127.0.0.1:{self.port}"

    def stop_faults(self) -> None:
        """New connections no longer draw faults."""
        self._fault_rates, self._first = {}, []

    def _serve(self, started: threading.Event) -> None:
        async def listen() -> None:
            server = await asyncio.start_server(self._handle_connection, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await self._stopping.wait()
            server.close()
            open_ones = asyncio.all_tasks() - {asyncio.current_task()}
            for task in open_ones:
                task.cancel()
            await asyncio.gather(*open_ones, return_exceptions=True)
            await asyncio.sleep(0.1)  # closed sockets are released in the next iterations of the loop

        self._loop.run_until_complete(listen())
        self._loop.close()

    async def _handle_connection(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        fault, after = self._draw_fault(), self._rng.randrange(MAX_BYTES)
        self.counts[fault] += 1
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
            upstream = asyncio.ensure_future(_pump(from_client, to_server, "slow" if fault == "slow" else "none", 0))
            try:
                await _pump(from_server, to_client, fault, after)
            finally:
                upstream.cancel()
                to_server.close()
        except (OSError, asyncio.CancelledError):
            pass  # the server or the client disconnected
        finally:
            _close(to_client, reset=fault == "reset")

    def _draw_fault(self) -> str:
        if self._first:
            return self._first.pop(0)
        chance = self._rng.random()
        for fault, rate in self._fault_rates.items():
            chance -= rate
            if chance < 0:
                return fault
        return "none"


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, fault: str, after: int) -> None:
    """Forward data until the fault occurs."""
    passed = 0
    with contextlib.suppress(OSError):
        while data := await source.read(2**14):
            if fault == "slow":
                await asyncio.sleep(SECONDS)
            elif fault != "none" and passed + len(data) > after:
                target.write(data[: max(0, after - passed)])
                if fault == "blackhole":
                    await asyncio.sleep(3600)
                return
            target.write(data)
            await target.drain()
            passed += len(data)


def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset:
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends RST
    writer.close()
