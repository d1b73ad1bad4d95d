"""A replay of stages from what was logged at their ends, against the executors that ran them.

Three stages train on threads that take turns: whoever waits for a peer lets another one go on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, cast

import pytest
import torch
from torch import Tensor, nn

from equality_job import Points
from everstep.comm.channels import Channels
from everstep.comm.framing import Direction
from everstep.comm.group import Group, SoloGroup
from everstep.comm.reading import Message
from everstep.core.clock import ManualClock
from everstep.core.errors import GenerationEnded
from everstep.core.ids import WorkerId
from everstep.execute.data import PARTS, Fetcher, Microbatch, SampleOrder, Slicing
from everstep.execute.executor import Clipping, Executor, StepReport, upcoming
from everstep.execute.links import Links
from everstep.execute.replay import Piece, ReplayedStep, Replayer, Scale
from everstep.execute.split import StageModule, split_model
from everstep.execute.stage import Stage, data_parts
from everstep.execute.update import CLIP_EPSILON, Update
from everstep.schedule.actions import Kind
from everstep.schedule.durations import Durations
from everstep.schedule.planner import plan
from everstep.schedule.problem import Problem

STAGES = 3
MICROBATCHES = 4
STEPS = 4
CLIP_NORM = 0.7
WITHIN_S = 20.0

SLICING = Slicing(
    order=SampleOrder(num_samples=64, batch_size=32, seed=3), replicas=1, microbatches=MICROBATCHES
)
DATASET = Points(1, 6, 6)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * 36, 2),
    )


def pieces() -> list[Piece]:
    """As they are built: the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        modules = split_model(model(), num_stages=STAGES, example=DATASET[0][0][None])
    return [_piece(module, index) for index, module in enumerate(modules)]


def _piece(module: StageModule, index: int) -> Piece:
    stage = Stage(
        module,
        index=index,
        num_stages=STAGES,
        loss=nn.functional.cross_entropy,
        metrics={"mean": lambda output, _: output.mean()},
        loss_scale=1 / MICROBATCHES,
        seed=9,
    )
    params = list(stage.module.module.parameters())
    if not params:
        return Piece(stage=stage, update=Update(stage.buckets, None, None))
    optimizer = torch.optim.AdamW(params, lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    return Piece(stage=stage, update=Update(stage.buckets, optimizer, scheduler))


Turn = threading.Condition
Sent = tuple[list[Tensor], str]
Found = TypeVar("Found")


@dataclass(slots=True)
class Wires:
    """Of all stages; what was sent stays, as in a log that holds everything."""

    turn: Turn = field(default_factory=Turn)
    sent: dict[tuple[int, Direction, str], Sent] = field(default_factory=dict)
    log: dict[tuple[Microbatch, Kind, int], Sent] = field(default_factory=dict)

    def at(self, stage: int) -> Channels:
        return cast(Channels, _Ends(self, stage))


@dataclass(slots=True)
class _Ends:
    wires: Wires
    stage: int

    def send(
        self, peer: WorkerId, direction: Direction, key: str, tensors: Sequence[Tensor], shape: str
    ) -> None:
        self.wires.sent[peer.stage, direction, key] = [t.clone() for t in tensors], shape
        self.wires.turn.notify_all()

    def receive(
        self, peer: WorkerId, direction: Direction, key: str, *, timeout_s: float
    ) -> Message:
        del peer, timeout_s
        slot = (self.stage, direction, key)
        assert self.wires.turn.wait_for(lambda: slot in self.wires.sent, WITHIN_S), slot
        tensors, shape = self.wires.sent.pop(slot)
        return Message(key=key, structure=shape, tensors=tuple(tensors))


class TurnGroup:
    """Sums over threads that hold the turn."""

    def __init__(self, turn: Turn, members: tuple[WorkerId, ...]) -> None:
        self.turn = turn
        self._members = members
        self._given: dict[int, list[Tensor]] = {}
        self._calls = [itertools.count() for _ in members]

    def of(self, rank: int) -> Group:
        return cast(Group, _Seat(self, rank, self._members))

    def give(self, rank: int, tensor: Tensor) -> _Summing:
        number = next(self._calls[rank])
        given = self._given.setdefault(number, [])
        given.append(tensor.clone())
        self.turn.notify_all()
        return _Summing(self.turn, given, tensor, len(self._members))


@dataclass(slots=True)
class _Seat:
    group: TurnGroup
    rank: int
    members: tuple[WorkerId, ...]

    def all_reduce(self, tensor: Tensor) -> _Summing:
        return self.group.give(self.rank, tensor)


@dataclass(slots=True)
class _Summing:
    turn: Turn
    given: list[Tensor]
    tensor: Tensor
    num_members: int

    def wait(self, timeout_s: float) -> None:
        del timeout_s
        assert self.turn.wait_for(lambda: len(self.given) == self.num_members, WITHIN_S)
        self.tensor.copy_(torch.stack(self.given).sum(0))


class _FreePace:
    def check(self) -> None: ...
    def wait_watermark(self, step: int) -> None: ...
    def before_update(self) -> None: ...


@dataclass(slots=True)
class _Recorder:
    wires: Wires

    def sent(
        self, mb: Microbatch, kind: Kind, stage: int, tensors: Sequence[Tensor], structure: str
    ) -> None:
        self.wires.log[mb, kind, stage] = [t.detach().clone() for t in tensors], structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """A run of all stages, with all that was sent."""

    pieces: list[Piece]
    log: dict[tuple[Microbatch, Kind, int], Sent]
    scales: dict[int, float]
    last: StepReport
    """Of the last stage's last step."""


def together(turn: Turn, job: Callable[[int], Found], *, number: int) -> list[Found]:
    """Runs `job` for 0, 1, ... on a thread of its own each, one at a time."""

    def one(rank: int) -> Found:
        torch.set_num_threads(1)  # each thread has a number of its own, and bits depend on it
        with turn:
            return job(rank)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(one, range(number)))


def train(clipping: Clipping | None) -> Original:
    wires, built = Wires(), pieces()
    places = tuple(WorkerId(0, stage) for stage in range(STAGES))
    world = TurnGroup(wires.turn, places)
    problem = Problem(
        replicas=1, stages=STAGES, microbatches=MICROBATCHES, durations=Durations.uniform(STAGES)
    )
    actions = plan(problem).actions
    scales: dict[int, float] = {}
    last: list[StepReport] = []

    def run(stage: int) -> None:
        place, piece = places[stage], built[stage]
        parts = data_parts(piece.stage)
        fetcher = Fetcher(DATASET, SLICING, parts=parts) if parts else None
        if fetcher is not None:
            fetcher.expect(upcoming(actions[place], first_step=0))
        solo = SoloGroup(generation=1, me=place)
        executor = Executor(
            piece.stage,
            piece.update,
            links=Links(channels=wires.at(place.stage), stage=solo, world=world.of(place.stage)),
            pace=_FreePace(),
            fetcher=fetcher,
            num_microbatches=MICROBATCHES,
            clipping=clipping,
            clock=ManualClock(),
            log=_Recorder(wires),
        )
        for step in range(STEPS):
            report = executor.run(step, actions[place])
            scales.update(piece.update.take_clipped())
            if clipping is not None and clipping.is_post_validated:
                total = torch.tensor([report.norm_squared], dtype=torch.float64)
                world.of(place.stage).all_reduce(total).wait(WITHIN_S)
                scale = CLIP_NORM / (total.item() ** 0.5 + CLIP_EPSILON)
                if scale < 1:
                    piece.update.redo(scale=scale)
                    scales[step] = scale
            if place == places[-1]:
                last[:] = [report]
        if fetcher is not None:
            fetcher.close()

    together(wires.turn, run, number=STAGES)
    return Original(pieces=built, log=wires.log, scales=scales, last=last[0])


@dataclass(frozen=True, slots=True)
class _Logged:
    log: dict[tuple[Microbatch, Kind, int], Sent]
    first: int
    last: int

    def activation(self, mb: Microbatch) -> Sent:
        return self.log[mb, Kind.FORWARD, self.first - 1]

    def gradient(self, mb: Microbatch) -> Sent:
        return self.log[mb, Kind.INPUT_GRADIENT, self.last + 1]


def replay(
    original: Original,
    first: int,
    last: int,
    *,
    numbers: Sequence[int] = range(MICROBATCHES),
    group: Group | None = None,
    is_post_validated: bool = False,
    recorder: _Recorder | None = None,
    steps: int = STEPS,
) -> tuple[list[Piece], ReplayedStep]:
    built = pieces()[first : last + 1]
    needed = {"input": first == 0, "target": last == STAGES - 1}
    parts = [part for part in PARTS if needed[part]]
    with Fetcher(DATASET, SLICING, parts=parts or ["input"]) as fetcher:
        shares = [[Microbatch(step, 0, number) for number in numbers] for step in range(steps)]
        fetcher.expect(itertools.chain(*shares))
        replayer = Replayer(
            built,
            logged=_Logged(original.log, first, last),
            fetcher=fetcher if parts else None,
            group=group or SoloGroup(generation=2, me=WorkerId(0, first)),
            on_sent=(recorder or _Recorder(Wires())).sent,
            check=lambda: None,
        )
        result = ReplayedStep()
        for step, share in enumerate(shares):
            scale = Scale(original.scales.get(step), is_post_validated=is_post_validated)
            replayer.run(share, scale=scale)
            result = replayer.result(step, num_microbatches=MICROBATCHES)
    return built, result


def tensors_of(piece: Piece) -> list[Tensor]:
    """All that a stage is: parameters, running statistics, what the optimizer keeps."""
    found = list(piece.stage.module.module.state_dict().values())
    if piece.update.optimizer is not None:
        assert piece.update.scheduler is not None
        states = piece.update.optimizer.state_dict()["state"].values()
        found += [value for state in states for value in state.values()]
        found.append(torch.tensor(piece.update.scheduler.get_last_lr()))
    return found


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Found in a whole run of the tests: others had set it, for this thread only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def original() -> Original:
    return train(None)


RANGES = [(0, 0), (1, 1), (2, 2), (0, 1), (1, 2)]


@pytest.mark.parametrize(("first", "last"), RANGES)
def test_a_replay_of_all_micro_batches_ends_with_the_very_bits(
    original: Original, first: int, last: int
) -> None:
    replayed, result = replay(original, first, last)
    for piece, lost in zip(replayed, original.pieces[first : last + 1], strict=True):
        assert all(map(torch.equal, tensors_of(piece), tensors_of(lost)))
    expected = original.last if last == STAGES - 1 else ReplayedStep()
    assert (result.loss, result.metrics) == (expected.loss, expected.metrics)


@pytest.mark.parametrize("is_post_validated", [False, True])
def test_clipped_steps_are_clipped_alike(is_post_validated: bool) -> None:
    clipping = Clipping(norm=CLIP_NORM, is_post_validated=is_post_validated)
    clipped = train(clipping)
    assert clipped.scales, "it clips nothing"
    assert len(clipped.scales) < STEPS, "it clips everything"
    for first, last in ((1, 1), (1, 2)):
        replayed, _ = replay(clipped, first, last, is_post_validated=is_post_validated)
        for piece, lost in zip(replayed, clipped.pieces[first : last + 1], strict=True):
            assert all(map(torch.equal, tensors_of(piece), tensors_of(lost)))


def test_what_the_range_had_sent_is_given_to_the_log_again(original: Original) -> None:
    """Or the next loss beside it would find nothing."""
    wires = Wires()
    replay(original, 1, 1, recorder=_Recorder(wires))
    sent = {slot: entry for slot, entry in original.log.items() if slot[2] == 1}
    assert wires.log.keys() == sent.keys()
    for slot, (tensors, structure) in sent.items():
        again, same_structure = wires.log[slot]
        assert structure == same_structure
        assert all(map(torch.equal, tensors, again))


@pytest.mark.parametrize("num_sharing", [2, 3])
def test_those_who_share_the_micro_batches_end_alike_and_close_to_the_lost_state(
    original: Original, num_sharing: int
) -> None:
    """Three do not divide four evenly."""
    places = tuple(WorkerId(0, number) for number in range(num_sharing))
    group = TurnGroup(Turn(), places)

    def share(rank: int) -> tuple[list[Piece], ReplayedStep]:
        numbers = range(rank, MICROBATCHES, num_sharing)
        return replay(original, 1, 2, numbers=numbers, group=group.of(rank))

    found = together(group.turn, share, number=num_sharing)
    first, first_result = found[0]
    for each, result in found:
        assert result == first_result
        assert result.loss == pytest.approx(original.last.loss, rel=1e-5)
        for piece, other, lost in zip(each, first, original.pieces[1:], strict=True):
            params = [list(p.stage.module.module.parameters()) for p in (piece, other, lost)]
            for mine, theirs, was in zip(*params, strict=True):
                assert torch.equal(mine, theirs)
                assert torch.allclose(mine, was, rtol=1e-4, atol=1e-6)


def test_a_replay_stops_between_micro_batches_when_all_is_over(original: Original) -> None:
    seen: list[int] = []

    def check() -> None:
        seen.append(1)
        if len(seen) == 3:
            raise GenerationEnded(2)

    replayer = Replayer(
        pieces()[1:2],
        logged=_Logged(original.log, 1, 1),
        fetcher=None,
        group=SoloGroup(generation=2, me=WorkerId(0, 1)),
        on_sent=_Recorder(Wires()).sent,
        check=check,
    )
    with pytest.raises(GenerationEnded):
        replayer.run([Microbatch(0, 0, number) for number in range(4)], scale=Scale())
    assert len(seen) == 3
