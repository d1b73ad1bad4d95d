"""Re-routing only: B and W are one piece, all stages end a step together, and nobody moves.

Recovers like everstep, so it shows what decoupling, staggering and normalization bring.
"""

from __future__ import annotations

from everstep.schedule.problem import Variant
from everstep.sim.setting import Setting
from everstep.sim.systems.everstep import Rerouting


def rerouting_only(setting: Setting) -> Rerouting:
    return Rerouting(
        setting, name="re-routing only", variant=Variant.GLUED_SYNC, is_normalizing=False
    )
