"""Where prediction and measurement part: the time of a replayed run by what it was spent on.

Invariant: the parts add up to the whole, on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.sim.stretches import Kind, Stretch


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    kind: Kind
    number: int
    """Of stretches."""

    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        return self.predicted_s - self.measured_s


def break_down(measured: Sequence[Stretch], predicted_s: Sequence[float]) -> tuple[Part, ...]:
    """One for each kind, also where nothing was of that kind."""
    pairs = list(zip(measured, predicted_s, strict=True))
    return tuple(_part(kind, [pair for pair in pairs if pair[0].kind is kind]) for kind in Kind)


def _part(kind: Kind, pairs: Sequence[tuple[Stretch, float]]) -> Part:
    return Part(
        kind=kind,
        number=len(pairs),
        predicted_s=sum((seconds for _, seconds in pairs), start=0.0),
        measured_s=sum((stretch.seconds for stretch, _ in pairs), start=0.0),
    )
