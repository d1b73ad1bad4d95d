"""Copies the whole state of a stage from one worker to another: parameters, buffers, optimizer,
scheduler. Bit for bit, in pieces, each with a checksum. Or just the gradients of a step, for one
that is only that step behind: it takes the step itself and can then also take it back.

Nothing is changed on the receiving side before everything has arrived and is right, so a copy that
is interrupted leaves what was there. Randomness is keyed by step and micro-batch: there is none to
copy.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.comm.channels import Channels
from everstep.comm.framing import Direction
from everstep.core.errors import ConfigError, ProtocolBroken
from everstep.core.ids import WorkerId

COPY_WITHIN_S = 600.0

_TENSOR = "__tensor__"
"""Marks the place of a tensor in the document; no optimizer has a setting of that name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """What a stage's worker must hold to be like its peers."""

    module: nn.Module
    optimizer: Optimizer | None
    scheduler: LRScheduler | None


def send_state_copy(state: StageState, channels: Channels, *, to: WorkerId) -> None:
    """Returns when all of it has left this process."""
    document, tensors = _pack(state)
    _send(channels, to, "document", [], document)
    _send_tensors(tensors, channels, to=to)


def receive_state_copy(state: StageState, channels: Channels, *, source: WorkerId) -> None:
    """Makes `state` equal to the source's."""
    document = _receive(channels, source, "document").structure
    packed = json.loads(document)
    _unpack(state, packed, _receive_tensors(packed["tensors"], channels, source=source))


def send_gradients(buffers: Sequence[Tensor], channels: Channels, *, to: WorkerId) -> None:
    """Returns when all of it has left this process."""
    _send_tensors(buffers, channels, to=to)


def receive_gradients(buffers: Sequence[Tensor], channels: Channels, *, source: WorkerId) -> None:
    """Fills `buffers` with the source's, which must be alike."""
    received = _receive_tensors(len(buffers), channels, source=source)
    for buffer, tensor in zip(buffers, received, strict=True):
        buffer.copy_(tensor)


def _send_tensors(tensors: Sequence[Tensor], channels: Channels, *, to: WorkerId) -> None:
    for number, tensor in enumerate(tensors):
        _send(channels, to, f"tensor {number}", [tensor], str(_checksum(tensor)))
    channels.flush(timeout_s=COPY_WITHIN_S)


def _receive_tensors(number: int, channels: Channels, *, source: WorkerId) -> list[Tensor]:
    tensors = []
    for index in range(number):
        message = _receive(channels, source, f"tensor {index}")
        (tensor,) = message.tensors
        if str(_checksum(tensor)) != message.structure:
            what = f"tensor {index} of a copy arrived damaged"
            raise ProtocolBroken(what, peer=f"worker {source}")
        tensors.append(tensor)
    return tensors


def _send(channels: Channels, to: WorkerId, key: str, tensors: list[Tensor], text: str) -> None:
    channels.send(to, Direction.ACTIVATION, f"copy {key}", tensors, text, timeout_s=COPY_WITHIN_S)


def _receive(channels: Channels, source: WorkerId, key: str) -> Any:
    return channels.receive(source, Direction.ACTIVATION, f"copy {key}", timeout_s=COPY_WITHIN_S)


def _checksum(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def _pack(state: StageState) -> tuple[str, list[Tensor]]:
    tensors: list[Tensor] = []
    document = {
        "module": _describe(dict(state.module.state_dict()), tensors, "model"),
        "optimizer": None
        if state.optimizer is None
        else _describe(state.optimizer.state_dict(), tensors, "optimizer"),
        "scheduler": None
        if state.scheduler is None
        else _describe(state.scheduler.state_dict(), tensors, "scheduler"),
    }
    return json.dumps({**document, "tensors": len(tensors)}), tensors


def _describe(value: Any, tensors: list[Tensor], path: str) -> Any:
    """JSON of a state, tensors numbered. Keys that are no text (torch's parameter numbers) are
    kept as pairs."""
    match value:
        case Tensor():
            tensors.append(value.detach())
            return {_TENSOR: len(tensors) - 1}
        case dict():
            return {
                "__dict__": [
                    [key, _describe(item, tensors, f"{path}.{key}")] for key, item in value.items()
                ]
            }
        case tuple():
            return {"__tuple__": [_describe(item, tensors, path) for item in value]}
        case list():
            return [_describe(item, tensors, path) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise ConfigError(
                path,
                f"a {type(value).__name__}",
                "a state must be made of tensors, numbers, text, lists and dicts to be copied",
            )


def _rebuild(value: Any, tensors: list[Tensor]) -> Any:
    match value:
        case {"__tensor__": number}:
            return tensors[number]
        case {"__dict__": pairs}:
            return {key: _rebuild(item, tensors) for key, item in pairs}
        case {"__tuple__": items}:
            return tuple(_rebuild(item, tensors) for item in items)
        case list():
            return [_rebuild(item, tensors) for item in value]
        case _:
            return value


def _unpack(state: StageState, packed: dict[str, Any], tensors: list[Tensor]) -> None:
    state.module.load_state_dict(_rebuild(packed["module"], tensors))
    if state.optimizer is not None:
        state.optimizer.load_state_dict(_rebuild(packed["optimizer"], tensors))
    if state.scheduler is not None:
        state.scheduler.load_state_dict(_rebuild(packed["scheduler"], tensors))
