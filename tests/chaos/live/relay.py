"""What stands between a client's host and a frontend's: a relay of TCP streams that stalls, slows, corrupts and breaks them.

It needs no rights. To both ends a stall looks as packets that are dropped and sent again later, a break as a reset.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from fabric.clock import MonotonicClock

_AT_ONCE = 65_536


class Relay:
    """Listens at `port`, on loopback, and leads to `target`. All methods but `close` are for the driver's thread."""

    def __init__(self, target: tuple[str, int], seed: int) -> None:
        self.target = target
        self._draws = random.Random(seed)
        self._clock = MonotonicClock()
        self._stalled_until_ms = 0.0
        self._slow_until_ms = 0.0
        self._corrupt = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def stall(self, for_ms: float) -> None:
        """Nothing passes for so long."""
        self._stalled_until_ms = self._clock.now_ms() + for_ms

    def slow(self, for_ms: float) -> None:
        """For so long each piece takes 10 ms more."""
        self._slow_until_ms = self._clock.now_ms() + for_ms

    def corrupt(self) -> None:
        """A byte of the next piece, whichever way it goes, is another one."""
        self._corrupt += 1

    def reset(self) -> None:
        """Every connection ends with an RST."""
        self._call(self._reset)

    def close(self) -> None:
        """End it."""
        self._call(self._reset)
        self._call(self._loop.stop)
        self._thread.join(5.0)
        self._listening.close()

    def _call(self, what: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(what)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._relay, sock=self._listening))
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _reset(self) -> None:
        for writer in list(self._writers):
            own: Any = writer.get_extra_info("socket")
            if own is not None and own.fileno() >= 0:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._writers -= {writer, far_writer}
            for end in (writer, far_writer):
                end.transport.abort()

    async def _stall(self) -> None:
        wait_ms = self._stalled_until_ms - self._clock.now_ms()
        if wait_ms > 0:
            await asyncio.sleep(wait_ms / 1e3)
            await self._stall()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(_AT_ONCE):
                await self._stall()
                if self._clock.now_ms() < self._slow_until_ms:
                    await asyncio.sleep(0.01)
                if self._corrupt:
                    self._corrupt -= 1
                    place = self._draws.randrange(len(piece))
                    piece = piece[:place] + bytes([piece[place] ^ 0xFF]) + piece[place + 1 :]
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()
