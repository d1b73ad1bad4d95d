from __future__ import annotations

import socket
import struct

import pytest

from everstep.comm.store import StoreAddress, connect_store, start_store
from everstep.core.errors import StoreUnreachable

LISTEN = "0A"


def listening_hosts(port: int) -> set[str]:
    """The local addresses on which this machine listens at `port`, as the kernel tells them."""
    hosts = set()
    with open("/proc/net/tcp", encoding="ascii") as table:
        for line in list(table)[1:]:
            address, state = line.split()[1], line.split()[3]
            host, _, listening_port = address.partition(":")
            if state == LISTEN and int(listening_port, 16) == port:
                hosts.add(socket.inet_ntoa(struct.pack("<I", int(host, 16))))
    with open("/proc/net/tcp6", encoding="ascii") as table:
        for line in list(table)[1:]:
            address, state = line.split()[1], line.split()[3]
            if state == LISTEN and int(address.partition(":")[2], 16) == port:
                hosts.add("an IPv6 address")
    return hosts


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7"])
def test_the_store_listens_on_its_host_and_nowhere_else(host: str) -> None:
    with start_store(host) as store:
        assert listening_hosts(store.address.port) == {host}


def test_what_one_client_sets_another_gets() -> None:
    with start_store("127.0.0.1") as store:
        connect_store(store.address, timeout_s=5.0).set("key", "value")
        assert connect_store(store.address, timeout_s=5.0).get("key") == b"value"


def test_a_closed_store_frees_its_port() -> None:
    with start_store("127.0.0.1") as store:
        port = store.address.port
    assert listening_hosts(port) == set()


def test_a_store_that_is_not_there_is_named_in_the_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(StoreUnreachable, match=f"127.0.0.1:{port}"):
        connect_store(StoreAddress(host="127.0.0.1", port=port), timeout_s=0.1)
