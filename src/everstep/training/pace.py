"""What an executor asks between the parts of a step: may it go on, and may it change the state."""

from __future__ import annotations

from everstep.comm.lifetime import Lifetime
from everstep.training.guide import Guide
from everstep.training.saves import Saves


class Pace:
    """Of one generation."""

    def __init__(self, guide: Guide, lifetime: Lifetime, saves: Saves | None) -> None:
        self._guide = guide
        self._lifetime = lifetime
        self._saves = saves

    def check(self) -> None:
        """Raises when the generation is over."""
        self._lifetime.check()

    def wait_watermark(self, step: int) -> None:
        """Returns when everybody has finished `step`, which then stands."""
        self._guide.wait_watermark(step)
        if self._saves is not None:
            self._saves.stands(step)

    def before_update(self) -> None:
        if self._saves is not None:
            self._saves.before_update()
