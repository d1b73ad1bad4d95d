"""Two endpoints in one process; what needs a process that dies is in tests/multiprocess."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from everstep.comm.channels import Channels, Limits
from everstep.comm.dialing import parse_address
from everstep.comm.endpoint import Endpoint
from everstep.comm.framing import (
    MAX_HELLO_BYTES,
    Direction,
    Hello,
    Refusal,
    Refused,
    Welcome,
    encode,
)
from everstep.comm.lifetime import Lifetime
from everstep.comm.streams import read_header
from everstep.core.errors import (
    GenerationEnded,
    PeerLost,
    PeerRefused,
    PeerSilent,
    ProtocolBroken,
)
from everstep.core.ids import WorkerId

A, B = WorkerId(0, 0), WorkerId(0, 1)
ACTIVATION, GRADIENT = Direction.ACTIVATION, Direction.GRADIENT
WAIT_S = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Worker A sends activations to B, B sends gradients to A."""

    a: Endpoint
    b: Endpoint
    pool: ThreadPoolExecutor

    def open_a(
        self,
        generation: int = 1,
        *,
        timeout_s: float = WAIT_S,
        lifetime: Lifetime | None = None,
    ) -> Channels:
        return self.a.open(
            generation=generation,
            me=A,
            addresses={B: self.b.address},
            sends=[(B, ACTIVATION)],
            receives=[(B, GRADIENT)],
            token="t",
            timeout_s=timeout_s,
            lifetime=lifetime,
        )

    def open_b(self, generation: int = 1) -> Channels:
        return self.b.open(
            generation=generation,
            me=B,
            addresses={A: self.a.address},
            sends=[(A, GRADIENT)],
            receives=[(A, ACTIVATION)],
            token="t",
            timeout_s=WAIT_S,
        )

    def receive_only_b(self, *, token: str = "t", lifetime: Lifetime | None = None) -> Channels:
        return self.b.open(
            generation=1,
            me=B,
            addresses={},
            sends=[],
            receives=[(A, ACTIVATION)],
            token=token,
            timeout_s=WAIT_S,
            lifetime=lifetime,
        )

    def open_both(self, generation: int = 1) -> tuple[Channels, Channels]:
        of_b = self.pool.submit(self.open_b, generation)
        return self.open_a(generation), of_b.result(WAIT_S)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        limits = Limits(capacity=4, read_ahead=2)
        yield Pair(
            a=stack.enter_context(Endpoint(limits=limits)),
            b=stack.enter_context(Endpoint(limits=limits)),
            pool=stack.enter_context(ThreadPoolExecutor(4)),
        )


def call(stream_to: Endpoint, hello: Hello) -> socket.socket:
    stream = socket.create_connection(parse_address(stream_to.address), timeout=WAIT_S)
    stream.sendall(encode(hello))
    return stream


def is_running(future: Future[T]) -> bool:
    """Whether a call is blocked; looks after it had every chance to return."""
    with pytest.raises(TimeoutError):
        future.result(0.05)
    return True


def test_tensors_arrive_equal_with_their_key_and_structure(pair: Pair) -> None:
    a, b = pair.open_both()
    with a, b:
        sent = [
            torch.randn(3, 4),
            torch.arange(5),
            torch.tensor(True),
            torch.ones((), dtype=torch.bfloat16),
        ]
        a.send(B, ACTIVATION, "12 F 2.5", sent, structure="[0, {}]")
        message = b.receive(A, ACTIVATION, "12 F 2.5", timeout_s=WAIT_S)
        assert (message.key, message.structure) == ("12 F 2.5", "[0, {}]")
        assert all(map(torch.equal, message.tensors, sent))
        assert [each.dtype for each in message.tensors] == [each.dtype for each in sent]


def test_large_and_small_messages_keep_their_order(pair: Pair) -> None:
    a, b = pair.open_both()
    sizes = [1, 3_000_000, 2, 3_000_000, 3]
    with a, b:
        for size in sizes:
            a.send(B, ACTIVATION, str(size), [torch.full((size,), float(size))])
        for size in sizes:
            (found,) = b.receive(A, ACTIVATION, str(size), timeout_s=WAIT_S).tensors
            assert torch.equal(found, torch.full((size,), float(size)))


def test_an_unexpected_key_is_reported_with_both_keys(pair: Pair) -> None:
    a, b = pair.open_both()
    with a, b:
        a.send(B, ACTIVATION, "1 F 0.0", [])
        with pytest.raises(ProtocolBroken, match=r"'1 F 0.0' where '1 F 0.1' was expected"):
            b.receive(A, ACTIVATION, "1 F 0.1", timeout_s=WAIT_S)


def test_a_channel_that_was_not_opened_cannot_be_used(pair: Pair) -> None:
    a, b = pair.open_both()
    with a, b:
        with pytest.raises(ProtocolBroken, match="no channel for gradient 'k' to worker 0:1"):
            a.send(B, GRADIENT, "k", [])
        with pytest.raises(ProtocolBroken, match="no channel for activation 'k' from"):
            a.receive(B, ACTIVATION, "k", timeout_s=WAIT_S)


def test_a_receive_that_runs_out_of_time_says_what_it_waited_for(pair: Pair) -> None:
    a, b = pair.open_both()
    with a, b:
        with pytest.raises(PeerSilent, match=r"for activation '3 F 0.1': no word from worker 0:0"):
            b.receive(A, ACTIVATION, "3 F 0.1", timeout_s=0.02)
        a.send(B, ACTIVATION, "3 F 0.1", [])
        b.receive(A, ACTIVATION, "3 F 0.1", timeout_s=WAIT_S)
        assert b.waited_s >= 0.02


@pytest.mark.parametrize("free", [Channels.poison, Channels.close])
def test_ending_frees_a_blocked_receive(pair: Pair, free: Callable[[Channels], None]) -> None:
    a, b = pair.open_both()
    with a, b:
        blocked = pair.pool.submit(a.receive, B, GRADIENT, "k", timeout_s=WAIT_S)
        assert is_running(blocked)
        free(a)
        with pytest.raises(GenerationEnded):
            blocked.result(WAIT_S)


def test_a_full_channel_says_for_what_it_had_no_room(pair: Pair) -> None:
    a, b = pair.open_both()

    def send_too_much() -> None:
        for number in range(100):
            a.send(B, ACTIVATION, str(number), [torch.zeros(4_000_000)], timeout_s=0.0)

    with a, b, pytest.raises(PeerSilent, match=r"room to send activation '\d+' \(4 queued\)"):
        send_too_much()


def test_poison_frees_a_send_that_waits_for_room(pair: Pair) -> None:
    a, b = pair.open_both()

    def send_too_much() -> None:
        for number in range(100):
            a.send(B, ACTIVATION, str(number), [torch.zeros(4_000_000)], timeout_s=2 * WAIT_S)

    with a, b:
        blocked = pair.pool.submit(send_too_much)
        assert is_running(blocked)
        a.poison()
        with pytest.raises(GenerationEnded):
            blocked.result(WAIT_S)


def test_poison_is_final_and_may_be_repeated(pair: Pair) -> None:
    a, b = pair.open_both()
    with a, b:
        b.send(A, GRADIENT, "k", [])
        a.poison()
        a.poison()
        with pytest.raises(GenerationEnded):
            a.receive(B, GRADIENT, "k", timeout_s=WAIT_S)
        with pytest.raises(GenerationEnded):
            a.send(B, ACTIVATION, "k", [])


def test_what_was_sent_before_a_clean_close_is_still_delivered(pair: Pair) -> None:
    a, b = pair.open_both()
    with b:
        for number in range(6):
            a.send(B, ACTIVATION, str(number), [torch.full((200_000,), float(number))])
        flushed = pair.pool.submit(a.flush, timeout_s=WAIT_S)
        for number in range(3):
            b.receive(A, ACTIVATION, str(number), timeout_s=WAIT_S)
        flushed.result(WAIT_S)
        a.close()
        for number in range(3, 6):
            (found,) = b.receive(A, ACTIVATION, str(number), timeout_s=WAIT_S).tensors
            assert found[0] == number
        with pytest.raises(PeerLost, match="it left the generation") as lost:
            b.receive(A, ACTIVATION, "6", timeout_s=WAIT_S)
        assert lost.value.suspects == (A,)
        assert lost.value.has_left


def test_a_send_to_a_peer_that_left_is_an_error_soon(pair: Pair) -> None:
    a, b = pair.open_both()
    with a:
        b.close()

        def send_for_ever() -> None:
            while True:
                a.send(B, ACTIVATION, "k", [])

        with pytest.raises(PeerLost, match="lost worker 0:1 during send of activation 'k'"):
            pair.pool.submit(send_for_ever).result(WAIT_S)


def test_both_ends_may_send_far_ahead_before_they_receive(pair: Pair) -> None:
    """As many large messages as `capacity`, both ways at once: no send may wait for a receive."""
    a, b = pair.open_both()
    large = torch.zeros(2_000_000)
    with a, b:
        for number in range(4):
            a.send(B, ACTIVATION, str(number), [large], timeout_s=0.0)
            b.send(A, GRADIENT, str(number), [large], timeout_s=0.0)
        for number in range(4):
            b.receive(A, ACTIVATION, str(number), timeout_s=WAIT_S)
            a.receive(B, GRADIENT, str(number), timeout_s=WAIT_S)


def test_generations_follow_each_other_on_the_same_endpoints(pair: Pair) -> None:
    for generation in range(1, 6):
        a, b = pair.open_both(generation)
        with a, b:
            a.send(B, ACTIVATION, str(generation), [])
            b.receive(A, ACTIVATION, str(generation), timeout_s=WAIT_S)


def test_a_generation_that_has_ended_cannot_be_opened_again(pair: Pair) -> None:
    a, b = pair.open_both(2)
    a.close()
    b.close()
    for generation in (1, 2):
        with pytest.raises(GenerationEnded):
            pair.open_a(generation)


def test_opening_names_the_peers_that_are_missing(pair: Pair) -> None:
    with pytest.raises(
        PeerSilent, match=r"the channels activation to 0:1, gradient from 0:1: .* worker 0:1"
    ):
        pair.open_a(timeout_s=0.05)


def test_the_end_of_the_lifetime_frees_an_opening(pair: Pair) -> None:
    lifetime = Lifetime(1)
    opening = pair.pool.submit(pair.open_a, lifetime=lifetime)
    assert is_running(opening)
    lifetime.end()
    with pytest.raises(GenerationEnded):
        opening.result(WAIT_S)


def test_the_end_of_the_lifetime_poisons_open_channels(pair: Pair) -> None:
    lifetime = Lifetime(1)
    of_b = pair.pool.submit(pair.open_b)
    with pair.open_a(lifetime=lifetime) as a, of_b.result(WAIT_S):
        lifetime.end()
        with pytest.raises(GenerationEnded):
            a.receive(B, GRADIENT, "k", timeout_s=WAIT_S)


def test_a_wrong_token_is_refused(pair: Pair) -> None:
    lifetime = Lifetime(1)
    of_b = pair.pool.submit(pair.receive_only_b, token="other", lifetime=lifetime)
    with pytest.raises(PeerRefused, match=r"refused .* generation 1: the token is wrong"):
        pair.open_a()
    lifetime.end()
    with pytest.raises(GenerationEnded):
        of_b.result(WAIT_S)


def test_a_peer_that_is_not_there_is_lost_at_once(pair: Pair) -> None:
    pair.b.close()
    with pytest.raises(PeerLost, match="worker 0:1 during the opening of generation 1"):
        pair.open_a()


def test_a_straggler_of_an_ended_generation_is_refused(pair: Pair) -> None:
    a, b = pair.open_both(5)
    with a, b:
        late = Hello(generation=4, token="t", sender=A, direction=ACTIVATION)
        with call(pair.b, late) as stream:
            answer = read_header(stream, limit_bytes=MAX_HELLO_BYTES)
        assert answer == Refused(reason=Refusal.OVER)


def test_an_open_channel_cannot_be_taken_over(pair: Pair) -> None:
    a, b = pair.open_both()
    with a, b:
        again = Hello(generation=1, token="t", sender=A, direction=ACTIVATION)
        with call(pair.b, again) as stream:
            answer = read_header(stream, limit_bytes=MAX_HELLO_BYTES)
        assert isinstance(answer, Refused)


def test_an_early_connection_is_parked_until_its_generation_opens(pair: Pair) -> None:
    early = Hello(generation=1, token="t", sender=A, direction=ACTIVATION)
    with call(pair.b, early) as stream:
        of_b = pair.pool.submit(pair.receive_only_b)
        assert read_header(stream, limit_bytes=MAX_HELLO_BYTES) == Welcome()
        of_b.result(WAIT_S).close()


def test_a_parked_connection_is_refused_when_its_time_is_over() -> None:
    early = Hello(generation=1, token="t", sender=A, direction=ACTIVATION)
    with Endpoint(park_s=0.0) as endpoint, call(endpoint, early) as stream:
        answer = read_header(stream, limit_bytes=MAX_HELLO_BYTES)
        assert answer == Refused(reason=Refusal.LATE)


def test_a_stranger_is_hung_up_on_and_the_door_stays_open(pair: Pair) -> None:
    with socket.create_connection(parse_address(pair.a.address), timeout=WAIT_S) as stranger:
        stranger.sendall(b"GET ")  # As a length, far too much.
        assert stranger.recv(1) == b""
    a, b = pair.open_both()
    a.close()
    b.close()


def test_closing_everything_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with ThreadPoolExecutor(4) as pool, Endpoint() as a, Endpoint() as b:
        for end in Pair(a=a, b=b, pool=pool).open_both():
            end.close()
    deadline_s = time.monotonic() + WAIT_S
    while set(threading.enumerate()) - before and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    assert set(threading.enumerate()) == before
