"""Bugs of the groups that were found the hard way."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from everstep.comm.gloo import GlooGroup
from everstep.core.errors import GenerationEnded, PeerSilent
from everstep.core.ids import WorkerId


class DeafWork:
    """An operation of gloo's whose end gloo has missed."""

    def wait(self, timeout: timedelta) -> None:
        threading.Event().wait(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return False


class DeafGroup:
    def allreduce(self, tensors: list[torch.Tensor]) -> DeafWork:
        del tensors
        return DeafWork()


def deaf_group() -> GlooGroup:
    members = (WorkerId(0, 0), WorkerId(1, 0))
    return GlooGroup(DeafGroup(), generation=1, members=members, rank=0, sockets=[])


def test_poison_frees_a_wait_that_gloo_has_forgotten() -> None:
    """Seen: a send that began just as its connection was cut waited for ever in gloo's waitSend.
    The worker never said Halted and was lost after 60 s.
    So a wait looks after its group itself, now and then."""
    group = deaf_group()
    work = group.all_reduce(torch.zeros(1))
    threading.Timer(0.02, group.poison).start()
    with pytest.raises(GenerationEnded):
        work.wait(30.0)


def test_a_wait_in_pieces_still_ends_in_time() -> None:
    with pytest.raises(PeerSilent):
        deaf_group().all_reduce(torch.zeros(1)).wait(0.15)
