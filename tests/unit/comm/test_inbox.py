from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from everstep.comm.framing import Direction, Payload, TensorSpec, encode
from everstep.comm.inbox import Inbox
from everstep.comm.reader import Reader
from everstep.core.errors import PeerLost, PeerSilent, ProtocolBroken
from everstep.core.ids import WorkerId

WAIT_S = 10.0
HEADER = encode(
    Payload(key="k", structure="", tensors=(TensorSpec(dtype="uint8", shape=(10_000,)),))
)
BODY = bytes(range(250)) * 40


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Inbox]]:
    """The peer's end of a stream, and the inbox at ours."""
    theirs, ours = socket.socketpair()
    reader = Reader()
    inbox = Inbox(
        ours,
        generation=1,
        peer=WorkerId(0, 1),
        direction=Direction.ACTIVATION,
        read_ahead=2,
        reader=reader,
    )
    with theirs:
        yield theirs, inbox
        inbox.end()
        reader.close()
        inbox.close()


@pytest.mark.parametrize("place", [1, 3, 20, len(HEADER), len(HEADER) + 1, len(HEADER) + 5000])
def test_a_wait_that_ends_inside_a_message_loses_none_of_it(
    ends: tuple[socket.socket, Inbox], place: int
) -> None:
    peer, inbox = ends
    data = HEADER + BODY
    peer.sendall(data[:place])
    with pytest.raises(PeerSilent):
        inbox.get("k", timeout_s=0.01)
    peer.sendall(data[place:])
    (found,) = inbox.get("k", timeout_s=WAIT_S).tensors
    assert bytes(found.tolist()) == BODY


def test_messages_keep_their_order_whoever_reads_them(ends: tuple[socket.socket, Inbox]) -> None:
    """The reader and the waiting worker take turns, message by message, as they come."""
    peer, inbox = ends
    num_messages = 300

    def send_all() -> None:
        for number in range(num_messages):
            spec = TensorSpec(dtype="int64", shape=())
            peer.sendall(encode(Payload(key=str(number), structure="", tensors=(spec,))))
            peer.sendall(number.to_bytes(8, "little"))

    sender = threading.Thread(target=send_all)
    sender.start()
    for number in range(num_messages):
        (found,) = inbox.get(str(number), timeout_s=WAIT_S).tensors
        assert torch.equal(found, torch.tensor(number))
    sender.join(WAIT_S)


def test_a_peer_that_dies_inside_a_message_is_lost(ends: tuple[socket.socket, Inbox]) -> None:
    peer, inbox = ends
    peer.sendall((HEADER + BODY)[:-1])
    peer.close()
    with pytest.raises(PeerLost, match="closed in the middle of a message") as lost:
        inbox.get("k", timeout_s=WAIT_S)
    assert not lost.value.has_left


def test_rubbish_is_reported_with_its_sender(ends: tuple[socket.socket, Inbox]) -> None:
    peer, inbox = ends
    peer.sendall(b"\x02\x00\x00\x00no")
    with pytest.raises(ProtocolBroken, match="worker 0:1 sent a header that cannot be read"):
        inbox.get("k", timeout_s=WAIT_S)
