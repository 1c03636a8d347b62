"""A TCP line to a server that is slow, cut, silent or ends too early: an asyncio proxy on loopback, in a thread.

with BadLine(server_port, {"slow": 0.3, "reset": 0.1}, seed=0) as line:
    ...  # clients go to line.port; each connection meets its fate by the dice, after some thousand bytes
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

MOST_BYTES: Final = 20_000  # of an answer, before a connection meets its fate
SECONDS: Final = 0.1  # that a slow line takes for every piece


class BadLine:
    """Fates: `slow` (pieces come late), `reset` (RST), `truncate` (ends as if all were said), `blackhole` (silence)."""

    def __init__(self, port: int, fates: Mapping[str, float], seed: int = 0) -> None:
        self._target, self._fates, self._dice = port, dict(fates), random.Random(seed)
        # Each once, and the slow line last: clients keep a connection that lives, and would never meet the others.
        self._first = sorted(fates, key=lambda fate: fate == "slow")
        self.met: Counter[str] = Counter()
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    @property
    def endpoint(self) -> str:
        """Where clients must go."""
        return f"http://127.0.0.1:{self.port}"

    def heal(self) -> None:
        """From now on, new connections go well."""
        self._fates, self._first = {}, []

    def _serve(self, started: threading.Event) -> None:
        async def listen() -> None:
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await self._over.wait()
            server.close()
            open_ones = asyncio.all_tasks() - {asyncio.current_task()}
            for task in open_ones:
                task.cancel()
            await asyncio.gather(*open_ones, return_exceptions=True)
            await asyncio.sleep(0.1)  # the sockets of closed connections are let go in the next turns of the loop

        self._loop.run_until_complete(listen())
        self._loop.close()

    async def _connected(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        fate, after = self._drawn(), self._dice.randrange(MOST_BYTES)
        self.met[fate] += 1
        try:
            server, forth = await asyncio.open_connection("127.0.0.1", self._target)
            there = asyncio.ensure_future(_pump(client, forth, "well", 0))
            try:
                await _pump(server, back, fate, after)
            finally:
                there.cancel()
                forth.close()
        except (OSError, asyncio.CancelledError):
            pass  # the server is gone, or the line is
        finally:
            _end(back, abruptly=fate == "reset")

    def _drawn(self) -> str:
        if self._first:
            return self._first.pop(0)
        chance = self._dice.random()
        for fate, share in self._fates.items():
            chance -= share
            if chance < 0:
                return fate
        return "well"


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, fate: str, after: int) -> None:
    """Pass on what comes, until fate has it otherwise."""
    passed = 0
    with contextlib.suppress(OSError):
        while data := await source.read(2**14):
            if fate == "slow":
                await asyncio.sleep(SECONDS)
            elif fate != "well" and passed + len(data) > after:
                target.write(data[: max(0, after - passed)])
                if fate == "blackhole":
                    await asyncio.sleep(3600)
                return
            target.write(data)
            await target.drain()
            passed += len(data)


def _end(writer: asyncio.StreamWriter, *, abruptly: bool) -> None:
    if abruptly:
        plug: socket.socket = writer.get_extra_info("socket")
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close sends RST
    writer.close()
