"""What a worker is connected to in one generation: channels to its peers, groups to reduce in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everstep.comm.channels import ChannelId, Channels
from everstep.comm.framing import Direction
from everstep.comm.group import Group
from everstep.schedule.actions import Action, Kind

DIRECTIONS = {
    Kind.FORWARD: Direction.ACTIVATION,
    Kind.INPUT_GRADIENT: Direction.GRADIENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    channels: Channels | None
    """None for a worker without peers."""

    stage: Group
    """The live workers of this stage, which reduce their gradients."""

    world: Group
    """All live workers, which agree on norms and evaluations."""

    replays: tuple[Group, ...] = ()
    """Of each replay, those who share its micro-batches: this worker alone when it has no part."""

    def close(self) -> None:
        if self.channels is not None:
            self.channels.close()
        self.stage.close()
        self.world.close()
        for group in self.replays:
            group.close()


def channels_of(actions: Iterable[Action]) -> tuple[set[ChannelId], set[ChannelId]]:
    """The channels that a worker's actions send to and receive from."""
    sends: set[ChannelId] = set()
    receives: set[ChannelId] = set()
    for action in actions:
        if action.sends_to is not None:
            sends.add((action.sends_to, DIRECTIONS[action.kind]))
        if action.receives_from is not None:
            receives.add((action.receives_from, DIRECTIONS[action.kind]))
    return sends, receives
