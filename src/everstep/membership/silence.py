"""How long a worker may say nothing before it is suspected, and before it is lost. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from everstep.core.errors import ConfigError
from everstep.membership.states import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    suspect_after_s: float = 2.5
    lose_after_s: float = 5.0
    """Of silence. Closed connections and exits are noticed at once, whatever this says."""

    halt_within_s: float = 60.0
    """A worker that has not said Halted by then is lost."""

    tick_gap_s: float = 1.0
    """A longer gap between two ticks means that the coordinator itself stood still; the silence
    it then sees is its own."""

    def __post_init__(self) -> None:
        if not 0 < self.suspect_after_s <= self.lose_after_s:
            raise ConfigError(
                "suspect_after_s",
                self.suspect_after_s,
                f"must be above 0 and at most lose_after_s ({self.lose_after_s})",
            )


@dataclass(frozen=True, slots=True)
class GiveUp:
    how: str


@dataclass(frozen=True, slots=True)
class Suspect:
    pass


@dataclass(frozen=True, slots=True)
class Trust:
    pass


Verdict: TypeAlias = GiveUp | Suspect | Trust


def judge(state: State, *, silent_s: float, halting_s: float | None, patience: Patience) -> Verdict:
    """What to think of a worker; `halting_s` is how long ago all were told to halt."""
    if silent_s > patience.lose_after_s:
        return GiveUp(f"silent for {silent_s:.1f} s")
    if state is State.HALTING and halting_s is not None and halting_s > patience.halt_within_s:
        return GiveUp(f"it did not halt within {halting_s:.1f} s")
    if state is State.TRAINING and silent_s > patience.suspect_after_s:
        return Suspect()
    return Trust()
