"""Who does what in a replay: which micro-batches, which log, which channels.

Every participant works it out for itself from the coordinator's word. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.comm.channels import ChannelId
from everstep.comm.framing import Direction
from everstep.core.ids import WorkerId
from everstep.execute.data import Microbatch
from everstep.membership.facts import LogSource, Replay
from everstep.recovery.log_book import LogKey
from everstep.schedule.actions import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Who replays which micro-batches."""

    replay: Replay
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


def log_channels(replays: Sequence[Replay], me: WorkerId) -> tuple[set[ChannelId], set[ChannelId]]:
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


def entry_of(source: LogSource, step: int, number: int) -> LogKey:
    return LogKey(
        step=step,
        attempt=source.attempt,
        microbatch=number,
        boundary=source.boundary,
        direction=source.direction,
    )


def key_of(source: LogSource, step: int, number: int) -> str:
    return f"{step} {source.direction} {number}"
