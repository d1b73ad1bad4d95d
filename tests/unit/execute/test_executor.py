"""The executor of one worker among fake peers: when it touches gradients, what it reduces."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from everstep.comm.channels import Channels
from everstep.comm.framing import Direction
from everstep.comm.group import SoloGroup, Work
from everstep.comm.reading import Message
from everstep.core.clock import ManualClock
from everstep.core.errors import GenerationEnded
from everstep.core.ids import WorkerId
from everstep.execute.boundary import flatten
from everstep.execute.buckets import GradientBuckets
from everstep.execute.data import Fetcher, SampleOrder, Slicing
from everstep.execute.executor import Executor, upcoming
from everstep.execute.links import Links
from everstep.execute.reduction import Reduction
from everstep.execute.split import StageModule
from everstep.execute.stage import Stage
from everstep.execute.update import Update
from everstep.schedule.actions import Action
from everstep.schedule.durations import Durations
from everstep.schedule.planner import plan
from everstep.schedule.problem import Problem

FIRST, LAST = WorkerId(0, 0), WorkerId(0, 1)
MICROBATCHES = 4


class Squares:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), float(index)), torch.full((2,), float(index % 3))


class RecordingGroup(SoloGroup):
    def __init__(self) -> None:
        super().__init__(generation=1, me=LAST)
        self.reduced: list[int] = []

    def all_reduce(self, tensor: Tensor) -> Work:
        self.reduced.append(tensor.data_ptr())
        return super().all_reduce(tensor)


class ScriptedChannels:
    """The stage before this one: sends what it is asked for, and takes the gradients."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def receive(
        self, peer: WorkerId, direction: Direction, key: str, *, timeout_s: float
    ) -> Message:
        del timeout_s
        assert (peer, direction) == (FIRST, Direction.ACTIVATION)
        value = torch.randn(4, 4, requires_grad=True, generator=torch.Generator().manual_seed(1))
        tensors, structure = flatten(value)
        return Message(key=key, structure=structure, tensors=tuple(t.detach() for t in tensors))

    def send(
        self,
        peer: WorkerId,
        direction: Direction,
        key: str,
        tensors: Sequence[Tensor],
        structure: str = "",
    ) -> None:
        del structure
        assert (peer, direction, len(tensors)) == (FIRST, Direction.GRADIENT, 1)
        self.sent.append(key)


class WatchfulPace:
    """Calls `on_wait` when the executor asks for the watermark, as long as it has not come."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self.on_wait: Callable[[], None] = lambda: None
        self.is_over = False

    def check(self) -> None:
        if self.is_over:
            raise GenerationEnded(1)

    def wait_watermark(self, step: int) -> None:
        self.waited.append(step)
        self.on_wait()

    def before_update(self) -> None:
        """Nothing else reads the parameters."""


class Bench:
    """The last of two stages, with a bucket for each parameter."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.stage = Stage(
            StageModule(module=module, names={}),
            index=1,
            num_stages=2,
            loss=nn.functional.mse_loss,
            loss_scale=1 / MICROBATCHES,
            bucket_bytes=1,
        )
        self.optimizer = torch.optim.SGD(self.stage.module.module.parameters(), lr=0.1)
        self.group = RecordingGroup()
        self.channels = ScriptedChannels()
        self.pace = WatchfulPace()
        order = SampleOrder(num_samples=16, batch_size=16, shuffle=False)
        slicing = Slicing(order=order, replicas=1, microbatches=MICROBATCHES)
        self.fetcher = Fetcher(Squares(), slicing, parts=["target"])
        self.actions = _actions()
        self.fetcher.expect(upcoming(self.actions, first_step=0))
        self.executor = Executor(
            self.stage,
            Update(self.stage.buckets, self.optimizer, None),
            links=Links(channels=cast(Channels, self.channels), stage=self.group, world=self.group),
            pace=self.pace,
            fetcher=self.fetcher,
            num_microbatches=MICROBATCHES,
            clipping=None,
            clock=ManualClock(),
        )

    def gradients(self) -> list[Tensor]:
        return [buffer.clone() for buffer in self.stage.buckets.buffers]

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.stage.buckets.params]


def _actions() -> tuple[Action, ...]:
    problem = Problem(
        replicas=1, stages=2, microbatches=MICROBATCHES, durations=Durations.uniform(2)
    )
    return plan(problem).actions[LAST]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    with made.fetcher:
        yield made


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_the_gradients_of_a_step_are_untouched_until_its_watermark(bench: Bench) -> None:
    kept: list[list[Tensor]] = [bench.gradients()]
    is_kept: list[bool] = []
    bench.pace.on_wait = lambda: is_kept.append(same(bench.gradients(), kept[-1]))
    for step in range(3):
        bench.executor.run(step, bench.actions)
        kept.append(bench.gradients())
    assert bench.pace.waited == [-1, 0, 1]
    assert is_kept == [True, True, True]
    assert not same(kept[1], kept[2]), "the steps' gradients must differ for this to mean anything"


def test_a_step_begins_with_gradients_of_zero(bench: Bench) -> None:
    bench.optimizer.param_groups[0]["lr"] = 0.0
    bench.executor.run(0, bench.actions)
    first = bench.gradients()
    bench.executor.run(1, bench.actions)
    assert same(first, bench.gradients())


def test_forward_and_input_gradients_run_ahead_of_the_watermark(bench: Bench) -> None:
    sent_by_then: list[int] = []
    bench.pace.on_wait = lambda: sent_by_then.append(len(bench.channels.sent))
    bench.executor.run(0, bench.actions)
    assert sent_by_then[0] > 0
    assert len(bench.channels.sent) == MICROBATCHES


def test_a_generation_that_ends_at_the_watermark_leaves_the_last_step_to_be_undone(
    bench: Bench,
) -> None:
    bench.executor.run(0, bench.actions)
    gradients, weights = bench.gradients(), bench.weights()

    def end() -> None:
        raise GenerationEnded(1)

    bench.pace.on_wait = end
    with pytest.raises(GenerationEnded):
        bench.executor.run(1, bench.actions)
    assert same(bench.gradients(), gradients)
    assert same(bench.weights(), weights)


def test_nothing_is_begun_in_a_generation_that_is_over(bench: Bench) -> None:
    bench.pace.is_over = True
    with pytest.raises(GenerationEnded):
        bench.executor.run(0, bench.actions)
    assert bench.channels.sent == []
    assert bench.pace.waited == []


def test_the_buckets_are_reduced_in_their_order_and_each_once(bench: Bench) -> None:
    in_order = [buffer.data_ptr() for buffer in bench.stage.buckets.buffers]
    assert len(in_order) == 4
    for step in range(3):
        bench.group.reduced.clear()
        bench.executor.run(step, bench.actions)
        # The loss comes last.
        assert bench.group.reduced[:-1] == in_order


def test_reductions_start_in_bucket_order_whatever_order_parameters_are_ready_in() -> None:
    params = [nn.Parameter(torch.ones(size)) for size in (3, 1, 4, 1, 5, 9, 2, 6)]
    buckets = GradientBuckets(params, bucket_bytes=24)
    in_order = [buffer.data_ptr() for buffer in buckets.buffers]
    assert len(in_order) > 3
    for seed in range(20):
        buckets.begin()
        group = RecordingGroup()
        reduction = Reduction(buckets, group, step=0)
        ready = random.Random(seed).sample(params, len(params))
        for param in ready:
            assert group.reduced == in_order[: len(group.reduced)]
            reduction.note(param)
        reduction.finish()
        assert group.reduced == in_order
