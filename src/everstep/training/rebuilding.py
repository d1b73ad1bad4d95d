"""What a worker does for stages that are rebuilt: gives what it logged, computes its share.

    whoever logged at the ends of the range ---> its replayers: new workers, and others that help
                                                    |
                            a checkpoint's state ---+--> F, B, W of the lost steps, update by update

A helper builds the lost stages beside its own and lets them go afterwards: its own state is not
touched. What the range sent the first time is logged again, so that its neighbours are protected
as before. Invariant: all who take part go through the same replays in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
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
from everstep.training.stage_log import StageLog
from everstep.training.stage_tree import StageTree

LOG_WITHIN_S = 600.0
"""Between two entries: a peer that reads its disk is slow, but not so slow."""


class Pieces(Protocol):
    def __call__(self, first: int, last: int, *, checkpoint: int) -> list[Piece]:
        """Builds these stages anew, with the state of a checkpoint; -1: as they are built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Who replays which micro-batches."""

    replay: m.Replay
    replicas: int
    microbatches: int

    @property
    def num_microbatches(self) -> int:
        return self.replicas * self.microbatches

    def owners(self, number: int) -> tuple[WorkerId, ...]:
        replayers = self.replay.replayers
        return (replayers[number % len(replayers)],) if self.replay.is_shared else replayers

    def of(self, worker: WorkerId, step: int) -> list[Microbatch]:
        return [
            Microbatch(step, *divmod(number, self.microbatches))
            for number in range(self.num_microbatches)
            if worker in self.owners(number)
        ]

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
        pieces = self._pieces(replay.first_stage, replay.last_stage, checkpoint=replay.checkpoint)
        if self._me in replay.rebuilt:
            mine = self._me.stage - replay.first_stage
            _load(own, pieces[mine])
            pieces[mine] = own
        with self._fetching(share) as fetcher:
            replayer = Replayer(
                pieces,
                logged=_Inputs(share, self._log, channels, me=self._me),
                fetcher=fetcher,
                group=group,
                on_sent=self._log.sent_again(attempt),
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


def _load(own: Piece, fresh: Piece) -> None:
    """Gives `own` the state of another of the same stage."""
    tree = tree_of(fresh).tree()
    tree_of(own).load(tree, source="the same stage, built anew")


def tree_of(piece: Piece) -> StageTree:
    return StageTree(piece.stage.module, piece.update.optimizer, piece.update.scheduler)
