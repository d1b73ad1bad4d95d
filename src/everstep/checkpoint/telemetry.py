"""What a checkpoint cost, held against what the machine can do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

_NEWEST_WEIGHT = 0.5
"""Of the newest value in the running means: costs drift with the machine's load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What checkpoints cost so far, as running means; zeros before the first one."""

    stall_s: float = 0.0
    durable_s: float = 0.0
    size_bytes: int = 0
    num_saved: int = 0
    copy_bytes_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    """The limits, measured once at the start."""

    def after(self, *, stall_s: float, durable_s: float, size_bytes: int) -> Measured:
        weight = _NEWEST_WEIGHT if self.num_saved else 1.0
        return replace(
            self,
            stall_s=self.stall_s + weight * (stall_s - self.stall_s),
            durable_s=self.durable_s + weight * (durable_s - self.durable_s),
            size_bytes=size_bytes,
            num_saved=self.num_saved + 1,
        )


def ratio_to_limit(size_bytes: int, *, seconds: float, limit_bytes_per_s: float) -> float | None:
    """The share of the limit that was reached; None when the limit is not known."""
    if not limit_bytes_per_s or not seconds:
        return None
    return size_bytes / seconds / limit_bytes_per_s


class DeviceWait:
    """How long a compute stream stood before a copy: the device's clock knows, not the host's."""

    def __init__(self, copied: torch.cuda.Event, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self._before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._before.record(stream)
        stream.wait_event(copied)
        self._after.record(stream)

    def seconds(self) -> float:
        return self._before.elapsed_time(self._after) / 1000 if self._after.query() else 0.0  # type: ignore[no-untyped-call]


def queued_events(tensors: Iterable[torch.Tensor]) -> list[torch.cuda.Event]:
    """What the compute streams of these tensors have queued so far."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]
