"""The coordinator's shell: one port for WebSockets and HTTP around the pure `World`.

    /worker, /agent   WebSocket, see messages.py
    /status           the live job as JSON
    /healthz          "ok", without a token

Everything runs on one event loop, so the world needs no lock and messages to one peer leave in the
order in which the world sent them. A peer that does not read is cut off, not waited for.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from everstep.core.clock import Clock, SystemClock
from everstep.core.errors import ConfigError, MessageInvalid, WaitTimedOut
from everstep.core.events import EventLog
from everstep.membership import messages as m
from everstep.membership.access import Bind, check_peer, check_token
from everstep.membership.codec import (
    MAX_MESSAGE_BYTES,
    SUBPROTOCOL,
    Decoder,
    from_agent,
    from_worker,
)
from everstep.membership.peer import BYE, WRONG, Peer
from everstep.membership.status import describe
from everstep.membership.succession import Succession
from everstep.membership.takeover import Told
from everstep.membership.traffic import (
    Disconnected,
    Effect,
    Emit,
    End,
    Input,
    Outcome,
    Received,
    Send,
    StopAsked,
    Tick,
)
from everstep.membership.world import World

logger = logging.getLogger(__name__)

TICK_S = 0.25
HELLO_WITHIN_S = 10.0
FAREWELL_WITHIN_S = 2.0
"""How long the last messages may take to leave."""


class Coordinator:
    """Listens from the start; `serve` runs the job to its end."""

    def __init__(
        self,
        world: World,
        *,
        events: EventLog,
        bind: Bind | None = None,
        clock: Clock | None = None,
        told: Told | None = None,
    ) -> None:
        """`told` is what a coordinator of this job that was lost has already written."""
        self._world = world
        self._door = Succession(world, told=told)
        self._events = events
        self._bind = bind or Bind()
        self._clock = clock or SystemClock()
        self._peers: dict[str, Peer] = {}
        self._socket = _listen(self._bind)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()
        self._ended: Future[Outcome] = Future()

    @property
    def address(self) -> str:
        """`HOST:PORT`, the real port also when any was asked for."""
        return f"{self._bind.host}:{self._socket.getsockname()[1]}"

    @property
    def token(self) -> str:
        return self._bind.token

    @property
    def num_workers(self) -> int:
        return self._world.shape.num_workers

    async def serve(self) -> Outcome:
        """Runs until the world has ended and the last messages are out."""
        try:
            outcome = await self._serve()
        except BaseException as error:
            self._ended.set_exception(error)
            raise
        self._ended.set_result(outcome)
        return outcome

    async def _serve(self) -> Outcome:
        self._loop = asyncio.get_running_loop()
        shape = self._world.shape
        fields = {"replicas": shape.replicas, "stages": shape.stages}
        # Once uvicorn closes the socket its port is unknown, so the address is kept.
        address = self.address
        self._events.emit("started", {"address": address, **fields})
        server = _Server(self._server_config(address))
        chores = [
            asyncio.create_task(self._tick_forever()),
            asyncio.create_task(self._exit_when_over(server)),
        ]
        try:
            await server.serve(sockets=[self._socket])
        finally:
            for chore in chores:
                chore.cancel()
            self._socket.close()
        return self._world.outcome or Outcome(exit_code=1, why="the server stopped")

    def request_stop(self, why: str, *, exit_code: int) -> None:
        """Ends the job. From any thread; does nothing when it has ended."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the job has ended
                self._loop.call_soon_threadsafe(
                    self._handle, StopAsked(why=why, exit_code=exit_code)
                )

    def wait_ended(self, *, timeout_s: float) -> Outcome:
        """From another thread than the one that serves."""
        try:
            return self._ended.result(timeout_s)
        except TimeoutError:
            raise WaitTimedOut("end", source="the coordinator", after_s=timeout_s) from None

    def _server_config(self, address: str) -> uvicorn.Config:
        async def status(request: Request) -> Response:
            refusal = check_token(request, token=self._bind.token)
            if refusal is not None:
                return PlainTextResponse(refusal.why, refusal.status)
            return JSONResponse(
                describe(self._world, address=address, events=self._events.recent())
            )

        app = Starlette(
            routes=[
                Route("/status", status),
                Route("/healthz", lambda _: PlainTextResponse("ok")),
                WebSocketRoute("/worker", self._serve_worker),
                WebSocketRoute("/agent", self._serve_agent),
            ]
        )
        return uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            log_level="critical",
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_ping_interval=None,
            ws_per_message_deflate=False,
            timeout_graceful_shutdown=1,
        )

    async def _serve_worker(self, websocket: WebSocket) -> None:
        await self._converse(websocket, from_worker)

    async def _serve_agent(self, websocket: WebSocket) -> None:
        await self._converse(websocket, from_agent)

    async def _converse(
        self, websocket: WebSocket, decoder: Decoder[m.FromWorker] | Decoder[m.FromAgent]
    ) -> None:
        refusal = check_peer(websocket, token=self._bind.token)
        if refusal is not None:
            response = PlainTextResponse(refusal.why, refusal.status)
            await websocket.send_denial_response(response)
            return
        await websocket.accept(subprotocol=SUBPROTOCOL)
        peer = Peer(websocket, decoder)
        code, reason = BYE, ""
        try:
            hello = await asyncio.wait_for(peer.receive(), HELLO_WITHIN_S)
            await self._converse_as(peer, hello)
        except (WebSocketDisconnect, TimeoutError):
            reason = "no Hello came"
        except MessageInvalid as error:
            code, reason = WRONG, str(error)
        await peer.close(code, reason)

    async def _converse_as(self, peer: Peer, hello: m.FromWorker | m.FromAgent) -> None:
        if not isinstance(hello, m.Hello | m.Rejoin | m.AgentHello):
            raise MessageInvalid("the first must be Hello or Rejoin", size_bytes=0)
        if hello.uid in self._peers:
            raise MessageInvalid(f"the uid {hello.uid} is connected already", size_bytes=0)
        self._peers[hello.uid] = peer
        try:
            self._handle(Received(hello.uid, hello))
            await peer.run(lambda message: self._handle(Received(hello.uid, message)))
        finally:
            del self._peers[hello.uid]
            self._handle(Disconnected(hello.uid))

    def _handle(self, event: Input) -> None:
        try:
            effects = self._door.handle(event, now_s=self._clock.now_s())
        except Exception as error:  # a bug of ours must end the job, not leave workers waiting
            logger.exception("the coordinator failed on %s", event)
            why = f"the coordinator failed: {error!r}"
            effects = self._door.handle(StopAsked(why=why, exit_code=1), now_s=self._clock.now_s())
        for effect in effects:
            self._apply(effect)

    def _apply(self, effect: Effect) -> None:
        match effect:
            case Send(uid, message):
                peer = self._peers.get(uid)
                if peer is not None:  # else its Disconnected is on the way
                    peer.send(message)
            case Emit(event, fields):
                self._events.emit(event, fields)
            case End():
                self._over.set()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(Tick())

    async def _exit_when_over(self, server: uvicorn.Server) -> None:
        await self._over.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_WITHIN_S):
                for peer in list(self._peers.values()):
                    await peer.flush()
        server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the launcher decides what a signal means."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _listen(bind: Bind) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((bind.host, bind.port))
    except OSError as error:
        listener.close()
        raise ConfigError("address", f"{bind.host}:{bind.port}", error.strerror or "") from error
    listener.listen(socket.SOMAXCONN)
    return listener


@contextmanager
def start_coordinator(coordinator: Coordinator) -> Iterator[Coordinator]:
    """Serves from a thread. A job that still runs when the block ends is stopped."""
    started = threading.Event()

    async def serve() -> None:
        asyncio.get_running_loop().call_soon(started.set)
        await coordinator.serve()

    thread = threading.Thread(
        target=asyncio.run, args=(serve(),), name="everstep-coordinator", daemon=True
    )
    thread.start()
    try:
        if not started.wait(10.0):
            raise WaitTimedOut("start", source="the coordinator's thread", after_s=10.0)
        yield coordinator
    finally:
        coordinator.request_stop("its launcher is leaving", exit_code=1)
        thread.join(FAREWELL_WITHIN_S + 3.0)
