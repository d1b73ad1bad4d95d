"""The log of one worker as the protocol describes it: which messages it holds, and no bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from everstep.core.ids import WorkerId
from everstep.membership.facts import LogDirection, LogRun, Replay
from everstep.recovery.log_book import LogKey, runs_of
from everstep.schedule.actions import Action, Kind

DIRECTIONS = {
    Kind.FORWARD: LogDirection.FORWARD,
    Kind.INPUT_GRADIENT: LogDirection.BACKWARD,
}


@dataclass(slots=True)
class CrewLog:
    microbatches: int
    """Per replica."""

    keys: dict[tuple[int, int, int, LogDirection], LogKey] = field(default_factory=dict)
    """One attempt of each message, the newest."""

    scaled: set[int] = field(default_factory=set)
    """Steps whose gradients were scaled, as far as this worker has seen it."""

    def sends(self, actions: Iterable[Action], *, step: int, attempt: int) -> None:
        """All that a worker sends when it runs F and B of `step`."""
        for action in actions:
            if action.sends_to is not None:
                boundary = min(action.stage, action.sends_to.stage)
                number = action.replica * self.microbatches + action.microbatch
                self.keep(LogKey(step, attempt, number, boundary, DIRECTIONS[action.kind]))

    def keep(self, key: LogKey, *, replace: bool = True) -> None:
        slot = (key.step, key.microbatch, key.boundary, key.direction)
        if replace or slot not in self.keys:
            self.keys[slot] = key

    def collect(self, durable_step: int) -> None:
        self.keys = {slot: key for slot, key in self.keys.items() if key.step > durable_step}

    def runs(self) -> tuple[LogRun, ...]:
        return runs_of(self.keys.values())

    def sends_again(self, replay: Replay, share: Iterable[int], *, attempt: int) -> None:
        """What the stages of a replay had sent, of some micro-batches of each step."""
        for step in range(replay.checkpoint + 1, replay.last_step + 1):
            for number in share:
                for stage in range(replay.first_stage, replay.last_stage + 1):
                    for boundary, direction in (
                        (stage, LogDirection.FORWARD),
                        (stage - 1, LogDirection.BACKWARD),
                    ):
                        key = LogKey(step, attempt, number, boundary, direction)
                        self.keep(key, replace=False)


def check_sources(
    replay: Replay, logs: Mapping[WorkerId, CrewLog], *, num_stages: int, num_microbatches: int
) -> None:
    """Every message that entered the range is held by whom the plan names."""
    for step in range(replay.checkpoint + 1, replay.last_step + 1):
        for boundary, direction in (
            (replay.first_stage - 1, LogDirection.FORWARD),
            (replay.last_stage, LogDirection.BACKWARD),
        ):
            if not 0 <= boundary < num_stages - 1:
                continue
            (source,) = (
                source
                for source in replay.sources
                if (source.boundary, source.direction) == (boundary, direction)
                and source.first_step <= step <= source.last_step
            )
            assert len(source.holders) == num_microbatches
            for number, holder in enumerate(source.holders):
                held = logs[holder].keys[step, number, boundary, direction]
                assert held.attempt == source.attempt, "of another attempt"
