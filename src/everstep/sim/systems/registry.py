"""All systems by name, in the order of tables."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from everstep.checkpoint.baselines import CheckFreq, YoungDaly
from everstep.core.errors import ConfigError
from everstep.sim.setting import Setting, System
from everstep.sim.systems.bamboo import Bamboo
from everstep.sim.systems.everstep import everstep
from everstep.sim.systems.ideal import Ideal
from everstep.sim.systems.oobleck import Oobleck
from everstep.sim.systems.rerouting import rerouting_only
from everstep.sim.systems.restart import restart
from everstep.sim.systems.spares import Spares
from everstep.sim.systems.torchft import TorchFT

SYSTEMS: dict[str, Callable[[Setting], System]] = {
    "everstep": everstep,
    "re-routing": rerouting_only,
    "oobleck": Oobleck,
    "bamboo": Bamboo,
    "torchft": TorchFT,
    "restart-young-daly": lambda setting: restart(setting, YoungDaly(), name="Young/Daly"),
    "restart-checkfreq": lambda setting: restart(setting, CheckFreq(), name="CheckFreq"),
    "spares": Spares,
    "ideal": Ideal,
}


def chosen(names: list[str] | None) -> list[str]:
    """All when none are named."""
    for name in names or ():
        if name not in SYSTEMS:
            near = get_close_matches(name, SYSTEMS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(SYSTEMS)}"
            raise ConfigError("--system", name, hint)
    return list(names or SYSTEMS)
