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
from typing import Protocol

import torch
from torch import Tensor

from everstep.comm.channels import Channels
from everstep.comm.framing import Direction
from everstep.comm.group import Group
from everstep.core.ids import WorkerId
from everstep.execute.data import Fetcher, Microbatch
from everstep.execute.replay import Piece, ReplayedStep, Replayer, Scale
from everstep.membership.facts import LogDirection, Replay
from everstep.schedule.actions import Kind
from everstep.training.giving import LOG_WITHIN_S, Giver
from everstep.training.replay_share import Share, entry_of, key_of
from everstep.training.stage_log import StageLog
from everstep.training.stage_tree import StageTree


class Pieces(Protocol):
    def __call__(
        self, replay: Replay, *, own: Piece, group: Group
    ) -> AbstractContextManager[list[Piece]]:
        """The stages of the range with the state that the replay begins with, until they are let
        go; `own` is among them where this worker's state is rebuilt."""


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
        replay: Replay,
        *,
        own: Piece,
        group: Group,
        channels: Channels,
        attempt: int,
        check: Callable[[], None],
        on_failed: Callable[[str], None],
    ) -> ReplayedStep | None:
        """What the last step gave, when this worker's state is one of those rebuilt: it is then in
        `own`. `on_failed` may hear, from another thread, why the replay cannot go on; the end of
        the generation must follow."""
        share = Share(replay=replay, replicas=self._replicas, microbatches=self._microbatches)
        if self._me == replay.scales_from:
            self._give_scales(replay, channels)
        giver = Giver(share, self._log, channels, me=self._me, check=check)
        if self._me not in replay.replayers:
            giver.give()
            return None
        scales = self._scales(replay, channels)
        again = _LogAgain(share, self._log, channels, me=self._me, attempt=attempt)
        with (
            giver.giving(on_failed=on_failed),
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

    def _give_scales(self, replay: Replay, channels: Channels) -> None:
        rows = sorted(self._log.scales.items())
        table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)
        for other in replay.replayers:
            if other != self._me:
                channels.send(other, Direction.LOG, "scales", [table])

    def _scales(self, replay: Replay, channels: Channels) -> dict[int, float]:
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
        return self._find(mb, LogDirection.FORWARD)

    def gradient(self, mb: Microbatch) -> tuple[Sequence[Tensor], str]:
        return self._find(mb, LogDirection.BACKWARD)

    def _find(self, mb: Microbatch, direction: LogDirection) -> tuple[Sequence[Tensor], str]:
        number = mb.replica * self._share.microbatches + mb.number
        source = next(
            source
            for source in self._share.replay.sources
            if source.direction is direction and source.first_step <= mb.step <= source.last_step
        )
        holder = source.holders[number]
        if holder == self._me:
            return self._log.read(entry_of(source, mb.step, number))
        message = self._channels.receive(
            holder, Direction.LOG, key_of(source, mb.step, number), timeout_s=LOG_WITHIN_S
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


def give_state(piece: Piece, *, to: Piece) -> None:
    """Of the same stage."""
    tree_of(to).load(tree_of(piece).tree(), source="the same stage, built anew")


def tree_of(piece: Piece) -> StageTree:
    return StageTree(piece.stage.module, piece.update.optimizer, piece.update.scheduler)
