"""One accepted connection of the coordinator: reads, and writes what is queued, in order.

Bounded: a peer that does not read is cut off, never waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from everstep.membership import messages as m
from everstep.membership.codec import Decoder, encode

OnMessage: TypeAlias = Callable[[m.FromWorker | m.FromAgent], None]

MAX_UNSENT = 1024
"""Messages waiting for one peer. A live one takes a few per step, so this one reads no more."""

BYE = 1000
WRONG = 1008
"""Close codes: of a normal end, and of a peer that broke the rules."""


class Peer:
    """One accepted connection: reads until it ends, writes what is queued, in order."""

    def __init__(
        self, websocket: WebSocket, decoder: Decoder[m.FromWorker] | Decoder[m.FromAgent]
    ) -> None:
        self._websocket = websocket
        self._decoder = decoder
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue(MAX_UNSENT)
        self._is_stuck = asyncio.Event()

    def send(self, message: m.ToWorker | m.ToAgent) -> None:
        try:
            self._unsent.put_nowait(encode(message))
        except asyncio.QueueFull:
            self._is_stuck.set()

    async def receive(self) -> m.FromWorker | m.FromAgent:
        frame = await self._websocket.receive()
        if frame["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(frame.get("code", BYE))
        return self._decoder.decode(frame.get("bytes") or frame.get("text") or b"")

    async def run(self, on_message: OnMessage) -> None:
        """Until either side ends it, or the peer stops reading."""
        tasks = [
            asyncio.create_task(self._read(on_message)),
            asyncio.create_task(self._write()),
            asyncio.create_task(self._is_stuck.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._forget_unsent()
        for task in done:
            task.result()

    async def flush(self) -> None:
        await self._unsent.join()

    async def close(self, code: int, reason: str) -> None:
        if self._websocket.application_state is WebSocketState.CONNECTED:
            # The peer may have left meanwhile; Starlette then answers with a RuntimeError.
            with suppress(RuntimeError, WebSocketDisconnect):
                await self._websocket.close(code, reason[:100])

    async def _read(self, on_message: OnMessage) -> None:
        while True:
            on_message(await self.receive())

    async def _write(self) -> None:
        while True:
            frame = await self._unsent.get()
            try:
                await self._websocket.send_bytes(frame)
            finally:
                self._unsent.task_done()

    def _forget_unsent(self) -> None:
        """Nobody reads any more, so `flush` must not wait for it."""
        while not self._unsent.empty():
            self._unsent.get_nowait()
            self._unsent.task_done()
