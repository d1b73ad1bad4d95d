"""Brings the whole model's state to one worker: the lead of each stage sends, the reporter reads.

One tensor a message, in the order of the stage's names, so no more than one is in the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from everstep.comm.channels import Channels
from everstep.comm.framing import Direction
from everstep.core.ids import WorkerId
from everstep.execute.split import StageModule

GATHER_WITHIN_S = 600.0


def send_state(module: StageModule, channels: Channels, *, to: WorkerId) -> None:
    """Returns when all of it has left this process."""
    for name, tensor in module.state_dict().items():
        channels.send(
            to, Direction.ACTIVATION, _key(name), [tensor.detach()], timeout_s=GATHER_WITHIN_S
        )
    channels.flush(timeout_s=GATHER_WITHIN_S)


def receive_state(
    channels: Channels, senders: Mapping[WorkerId, Sequence[str]]
) -> dict[str, Tensor]:
    """`senders` names the tensors that each lead sends, in order."""
    found: dict[str, Tensor] = {}
    for sender, names in senders.items():
        for name in names:
            message = channels.receive(
                sender, Direction.ACTIVATION, _key(name), timeout_s=GATHER_WITHIN_S
            )
            (found[name],) = message.tensors
    return found


def _key(name: str) -> str:
    return f"state {name}"
