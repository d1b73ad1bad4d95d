"""What a worker does for stages that are rebuilt: gives what it logged, computes its share.

    whoever logged at the ends of the range ---> its replayers: new workers, and others that help
                                                    |
                            a checkpoint's state ---+--> F, B, W of the lost steps, update by update

A helper holds the lost stages beside its own and lets them go afterwards: its own state is not
touched. What the range sent the first time is logged again by its own workers, so that everybody
is protected as before. Invariant: all who take part go through the same replays in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from everstep.comm.channels import ChannelId, Channels
from everstep.comm.framing import Direction
from everstep.comm.group import Group
from everstep.core.ids import WorkerId
from everstep.execute.data import Fetcher, Microbatch
from everstep.execute.replay import Piece, ReplayedStep, Replayer, Scale
from everstep.membership import messages as m
from everstep.recovery.log import LogKey
from everstep.schedule.actions import Kind
from everstep.training.stage_log import StageLog
from everstep.training.stage_tree import StageTree

LOG_WITHIN_S = 600.0
"""Between two entries: a peer that reads its disk is slow, but not so slow."""


class Pieces(Protocol):
    def __call__(
        self, replay: m.Replay, *, own: Piece, group: Group
    ) -> AbstractContextManager[list[Piece]]:
        """The stages of the range with the state that the replay begins with, until they are let
        go; `own` is among them where this worker's state is rebuilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Who replays which micro-batches."""

    replay: m.Replay
    replicas: int
    microbatches: int

    @property
    def num_microbatches(self) -> int:
        return self.replicas * self.microbatches

    def microbatch(self, step: int, number: int) -> Microbatch:
        return Microbatch(step, *divmod(number, self.microbatches))

    def owners(self, number: int) -> tuple[WorkerId, ...]:
        replayers = self.replay.replayers
        return (replayers[number % len(replayers)],) if self.replay.is_shared else replayers

    def of(self, worker: WorkerId, step: int) -> list[Microbatch]:
        return [
            self.microbatch(step, number)
            for number in range(self.num_microbatches)
            if worker in self.owners(number)
        ]

    def keeper(self, number: int, stage: int) -> WorkerId | None:
        """Who logs again what `stage` sent of a micro-batch: one of its own workers, as the first
        time. With anybody else it could be lost together with the very stage that needs it. None
        where there is no such worker among the replayers: then whoever runs the micro-batch."""
        keepers = [place for place in self.replay.replayers if place.stage == stage]
        return keepers[number % len(keepers)] if self.replay.is_shared and keepers else None

    def sent(self, *, num_stages: int) -> list[tuple[Kind, int]]:
        """What the stages of the range send of each micro-batch, in the order of a replay."""
        span = range(self.replay.first_stage, self.replay.last_stage + 1)
        forward = [(Kind.FORWARD, stage) for stage in span if stage < num_stages - 1]
        return forward + [(Kind.INPUT_GRADIENT, stage) for stage in reversed(span) if stage > 0]

    def steps(self) -> range:
        return range(self.replay.checkpoint + 1, self.replay.last_step + 1)


def log_channels(
    replays: Sequence[m.Replay], me: WorkerId
) -> tuple[set[ChannelId], set[ChannelId]]:
    """The channels on which `me` gives and gets what was logged."""
    sends: set[ChannelId] = set()
    receives: set[ChannelId] = set()
    for replay in replays:
        holders = {holder for source in replay.sources for holder in source.holders}
        holders.add(replay.scales_from)
        if me in holders:
            sends |= {(other, Direction.LOG) for other in replay.replayers if other != me}
        if me in replay.replayers:
            receives |= {(other, Direction.LOG) for other in holders if other != me}
        if replay.is_shared and me in replay.replayers:
            span = range(replay.first_stage, replay.last_stage + 1)
            again = {(p, Direction.LOGGED_AGAIN) for p in replay.replayers if p != me}
            sends |= {channel for channel in again if channel[0].stage in span}
            receives |= again if me.stage in span else set()
    return sends, receives


class Rebuilder:
    """Of one worker."""

    def __init__(
        self,
        log: StageLog,
        *,
        me: WorkerId,
        replicas: int,
        microbatches: int,
        is_post_validated: bool,
        pieces: Pieces,
        fetcher: Callable[[int, int], Fetcher | None],
    ) -> None:
        """`fetcher`: of what a range of stages needs of the data; None for inner stages."""
        self._log = log
        self._me = me
        self._replicas = replicas
        self._microbatches = microbatches
        self._is_post_validated = is_post_validated
        self._pieces = pieces
        self._fetcher = fetcher

    def take_part(
        self,
        replay: m.Replay,
        *,
        own: Piece,
        group: Group,
        channels: Channels,
        attempt: int,
        check: Callable[[], None],
    ) -> ReplayedStep | None:
        """What the last step gave, when this worker's state is one of those rebuilt: it is then in
        `own`."""
        share = Share(replay=replay, replicas=self._replicas, microbatches=self._microbatches)
        if self._me == replay.scales_from:
            self._give_scales(replay, channels)
        if self._me not in replay.replayers:
            for step in share.steps():
                check()
                self._give(share, step, channels)
                channels.flush(timeout_s=LOG_WITHIN_S)
            return None
        scales = self._scales(replay, channels)
        again = _LogAgain(share, self._log, channels, me=self._me, attempt=attempt)
        with (
            self._pieces(replay, own=own, group=group) as pieces,
            self._fetching(share) as fetcher,
        ):
            replayer = Replayer(
                pieces,
                logged=_Inputs(share, self._log, channels, me=self._me),
                fetcher=fetcher,
                group=group,
                on_sent=again.sent,
                check=check,
            )
            result = ReplayedStep()
            for step in share.steps():
                self._give(share, step, channels)
                factor = scales.get(step)
                replayer.run(
                    share.of(self._me, step),
                    scale=Scale(factor, is_post_validated=self._is_post_validated),
                )
                result = replayer.result(step, num_microbatches=share.num_microbatches)
                again.take(step, num_stages=own.stage.num_stages)
        self._log.scales |= scales
        return result if self._me in replay.rebuilt else None

    @contextmanager
    def _fetching(self, share: Share) -> Iterator[Fetcher | None]:
        fetcher = self._fetcher(share.replay.first_stage, share.replay.last_stage)
        with nullcontext() if fetcher is None else closing(fetcher):
            if fetcher is not None:
                fetcher.expect(mb for step in share.steps() for mb in share.of(self._me, step))
            yield fetcher

    def _give(self, share: Share, step: int, channels: Channels) -> None:
        """In the order in which replayers ask: micro-batch by micro-batch, forward first."""
        sources = [s for s in share.replay.sources if s.first_step <= step <= s.last_step]
        for number in range(share.num_microbatches):
            for source in sources:
                others = [owner for owner in share.owners(number) if owner != self._me]
                if source.holders[number] != self._me or not others:
                    continue
                tensors, structure = self._log.read(_entry(source, step, number))
                for other in others:
                    key = _key(source, step, number)
                    channels.send(other, Direction.LOG, key, tensors, structure)

    def _give_scales(self, replay: m.Replay, channels: Channels) -> None:
        rows = sorted(self._log.scales.items())
        table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)
        for other in replay.replayers:
            if other != self._me:
                channels.send(other, Direction.LOG, "scales", [table])

    def _scales(self, replay: m.Replay, channels: Channels) -> dict[int, float]:
        if self._me == replay.scales_from:
            return dict(self._log.scales)
        message = channels.receive(
            replay.scales_from, Direction.LOG, "scales", timeout_s=LOG_WITHIN_S
        )
        return {int(step): scale for step, scale in message.tensors[0].tolist()}


class _Inputs:
    """What entered the range, from this worker's own log or from whoever holds it."""

    def __init__(self, share: Share, log: StageLog, channels: Channels, *, me: WorkerId) -> None:
        self._share = share
        self._log = log
        self._channels = channels
        self._me = me

    def activation(self, mb: Microbatch) -> tuple[Sequence[Tensor], str]:
        return self._find(mb, m.LogDirection.FORWARD)

    def gradient(self, mb: Microbatch) -> tuple[Sequence[Tensor], str]:
        return self._find(mb, m.LogDirection.BACKWARD)

    def _find(self, mb: Microbatch, direction: m.LogDirection) -> tuple[Sequence[Tensor], str]:
        number = mb.replica * self._share.microbatches + mb.number
        source = next(
            source
            for source in self._share.replay.sources
            if source.direction is direction and source.first_step <= mb.step <= source.last_step
        )
        holder = source.holders[number]
        if holder == self._me:
            return self._log.read(_entry(source, mb.step, number))
        message = self._channels.receive(
            holder, Direction.LOG, _key(source, mb.step, number), timeout_s=LOG_WITHIN_S
        )
        return message.tensors, message.structure


class _LogAgain:
    """What the range sent the first time: into this worker's log, or to whoever keeps it."""

    def __init__(
        self, share: Share, log: StageLog, channels: Channels, *, me: WorkerId, attempt: int
    ) -> None:
        self._share = share
        self._log = log
        self._channels = channels
        self._me = me
        self._record = log.sent_again(attempt)

    def sent(
        self, mb: Microbatch, kind: Kind, stage: int, tensors: Sequence[Tensor], structure: str
    ) -> None:
        keeper = self._share.keeper(self._number(mb), stage)
        if keeper is None or keeper == self._me:
            self._record(mb, kind, stage, tensors, structure)
        elif self._log.keeps(kind, stage):
            self._channels.send(
                keeper, Direction.LOGGED_AGAIN, _again_key(mb, kind, stage), tensors, structure
            )

    def take(self, step: int, *, num_stages: int) -> None:
        """After a step: what others have sent here, in the order in which they ran."""
        kept = [each for each in self._share.sent(num_stages=num_stages) if self._log.keeps(*each)]
        for number in range(self._share.num_microbatches):
            owner, mb = self._share.owners(number)[0], self._share.microbatch(step, number)
            for kind, stage in kept:
                if owner == self._me or self._share.keeper(number, stage) != self._me:
                    continue
                message = self._channels.receive(
                    owner,
                    Direction.LOGGED_AGAIN,
                    _again_key(mb, kind, stage),
                    timeout_s=LOG_WITHIN_S,
                )
                self._record(mb, kind, stage, message.tensors, message.structure)

    def _number(self, mb: Microbatch) -> int:
        return mb.replica * self._share.microbatches + mb.number


def _again_key(mb: Microbatch, kind: Kind, stage: int) -> str:
    return f"{mb.step} {mb.replica}.{mb.number} {kind} of stage {stage}"


def _entry(source: m.LogSource, step: int, number: int) -> LogKey:
    return LogKey(
        step=step,
        attempt=source.attempt,
        microbatch=number,
        boundary=source.boundary,
        direction=source.direction,
    )


def _key(source: m.LogSource, step: int, number: int) -> str:
    return f"{step} {source.direction} {number}"


def give_state(piece: Piece, *, to: Piece) -> None:
    """Of the same stage."""
    tree_of(to).load(tree_of(piece).tree(), source="the same stage, built anew")


def tree_of(piece: Piece) -> StageTree:
    return StageTree(piece.stage.module, piece.update.optimizer, piece.update.scheduler)
