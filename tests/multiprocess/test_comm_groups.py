"""What every `Group` promises, for each implementation; then what gloo's adds."""

from __future__ import annotations

import threading

import pytest
import torch

from comm_workers import (
    WAIT_S,
    keep_contract,
    live_many_generations,
    members_of,
    num_sockets,
    wait_for_missing,
    workers,
)
from everstep.comm.gloo import form_gloo
from everstep.comm.group import Group
from everstep.comm.lifetime import Lifetime
from everstep.comm.store import StoreServer, connect_store, start_store
from everstep.core.errors import GenerationEnded, PeerSilent

needs_two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device for each of two members"
)


@pytest.mark.parametrize(
    ("kind", "size"),
    [("gloo", 1), ("gloo", 2), ("gloo", 3), pytest.param("nccl", 2, marks=needs_two_gpus)],
    ids=["solo", "gloo-2", "gloo-3", "nccl-2"],
)
def test_a_group_sums_broadcasts_and_ends_on_command(kind: str, size: int) -> None:
    with (
        start_store("127.0.0.1") as store,
        workers(keep_contract, [(kind, store.address, r, size) for r in range(size)]) as started,
    ):
        total = sum(range(1, size + 1))
        for rank, worker in enumerate(started):
            members, found_rank, summed, number, given = worker.hear()
            assert list(members) == members_of(size)
            assert found_rank == rank
            assert summed == [float(total)] * 1000
            assert number == total
            assert given == [float(size - 1)] * 3
        for worker in started:
            worker.pipe.send("poison")
            assert worker.hear() == 0


def test_poison_frees_members_stuck_on_one_that_is_alive() -> None:
    with (
        start_store("127.0.0.1") as store,
        workers(wait_for_missing, [(store.address, rank, 3) for rank in range(3)]) as started,
    ):
        stuck = started[:2]
        assert [worker.hear() for worker in started] == ["formed"] * 3
        for worker in stuck:
            assert "for an all-reduce: no word from worker" in worker.hear()
        stuck[0].pipe.send("poison")
        assert stuck[0].hear()[0] == "GenerationEnded"
        # That ended its connections, so the other may see those break before its own word comes.
        stuck[1].pipe.send("poison")
        assert stuck[1].hear()[0] in ("GenerationEnded", "PeerLost")
        assert [worker.hear() for worker in stuck] == ["closed"] * 2


def test_a_killed_member_is_named_by_those_it_was_connected_to() -> None:
    with (
        start_store("127.0.0.1") as store,
        workers(wait_for_missing, [(store.address, rank, 2) for rank in range(2)]) as started,
    ):
        survivor, victim = started
        assert [worker.hear() for worker in started] == ["formed"] * 2
        survivor.hear()
        victim.kill()
        kind, suspects, _ = survivor.hear()
        assert kind == "PeerLost"
        assert suspects == (members_of(2)[1],)
        assert survivor.hear() == "closed"


def test_each_group_holds_its_own_connections_and_no_others() -> None:
    with (
        start_store("127.0.0.1") as store,
        workers(num_sockets, [(store.address, rank, 3) for rank in range(3)]) as started,
    ):
        assert [worker.hear() for worker in started] == [[2, 2]] * 3
        for worker in started:
            worker.pipe.send("close the first")
        assert [worker.hear() for worker in started] == [3.0] * 3
        for worker in started:
            worker.pipe.send("close the second")


@pytest.mark.timeout(200)
def test_a_hundred_generations_leak_nothing() -> None:
    size, num_generations = 3, 100
    with (
        start_store("127.0.0.1") as store,
        workers(
            live_many_generations,
            [(store.address, rank, size, num_generations) for rank in range(size)],
        ) as started,
    ):
        addresses = [worker.hear() for worker in started]
        for worker in started:
            worker.pipe.send(addresses)
        early = [worker.hear() for worker in started]
        late = [worker.hear() for worker in started]
        assert late == early
        for worker in started:
            worker.pipe.send("done")


def form_alone(store: StoreServer, *, timeout_s: float, lifetime: Lifetime) -> Group:
    members = members_of(3)
    return form_gloo(
        store=store.address,
        generation=4,
        name="stage-1",
        me=members[0],
        members=members,
        timeout_s=timeout_s,
        lifetime=lifetime,
    )


def test_a_group_whose_members_do_not_come_names_them() -> None:
    with (
        start_store("127.0.0.1") as store,
        pytest.raises(PeerSilent, match="the group 4/stage-1: no word from worker 1:0, 2:0"),
    ):
        form_alone(store, timeout_s=1.0, lifetime=Lifetime(4))


@pytest.mark.parametrize(
    "num_met", [0, 1, 2], ids=["nobody came", "one came", "all met, then died"]
)
def test_the_end_of_the_lifetime_frees_a_group_that_is_forming(num_met: int) -> None:
    lifetime = Lifetime(4)
    with start_store("127.0.0.1") as store:
        client = connect_store(store.address, timeout_s=WAIT_S)
        for worker in members_of(3)[1 : 1 + num_met]:
            client.set(f"4/stage-1/address/{worker}", '[["127.0.0.1", 1]]')
        timer = threading.Timer(0.1, lifetime.end)
        timer.start()
        with pytest.raises(GenerationEnded):
            form_alone(store, timeout_s=WAIT_S, lifetime=lifetime)
        timer.join()
