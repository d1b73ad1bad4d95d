"""The store beside the coordinator, where the members of a group find each other.

torch's TCPStore has no authentication and would listen on every interface; it is given a listening
socket that is already bound, so it listens on the given host and nowhere else.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Self

from everstep.core.errors import StoreUnreachable

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class StoreServer:
    """Serves until it is closed. Clients that die while they wait do not disturb it."""

    def __init__(self, server: TCPStore, *, address: StoreAddress) -> None:
        self._server: TCPStore | None = server
        self.address = address

    def close(self) -> None:
        # torch has no call for it: the server ends with its last reference.
        self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_store(host: str) -> StoreServer:
    """Starts the server on a free port of `host`."""
    from torch._C._distributed_c10d import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    port = listener.getsockname()[1]
    server = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # The server closes it.
    )
    return StoreServer(server, address=StoreAddress(host=host, port=port))


def connect_store(address: StoreAddress, *, timeout_s: float) -> TCPStore:
    """A client of its own: one that waits blocks every other user of the same client."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    try:
        return TCPStore(
            address.host,
            address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except DistError as error:
        raise StoreUnreachable(str(address), cause=str(error).partition("\n")[0]) from error
