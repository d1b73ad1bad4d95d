"""Sent tensors, kept for the log at no cost to the one who sent them.

On the processor a reference is enough: what was sent is not changed afterwards, and torch's counter
of changes would tell. Off a CUDA device they are copied into page-locked memory on a side stream,
behind what the compute stream has queued; only who reads them waits for that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everstep.comm.streams import host_copy


class TensorChanged(Exception):
    """A tensor was changed after it was sent, so it is not what the peer got."""


class Capture:
    """The tensors of one message."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        structure: str,
        *,
        copied: Sequence[torch.cuda.Event] = (),
    ) -> None:
        self.structure = structure
        # Detached: the graph behind an activation holds all that its backward pass needs.
        self._tensors = [tensor.detach() for tensor in tensors]
        self._versions = [_version(tensor) for tensor in self._tensors]
        self._copied = copied
        self.num_bytes = sum(tensor.nbytes for tensor in self._tensors)
        self.memory_bytes = _storage_bytes(self._tensors)

    @property
    def is_unchanged(self) -> bool:
        return all(
            _version(tensor) == version
            for tensor, version in zip(self._tensors, self._versions, strict=True)
        )

    def read(self) -> list[Tensor]:
        """Contiguous tensors on the host, not to be modified. Waits for the device."""
        for event in self._copied:
            event.synchronize()
        on_host = [host_copy(tensor) for tensor in self._tensors]
        if not self.is_unchanged:
            raise TensorChanged("a tensor was modified in place after it was sent")
        return on_host


class Capturer:
    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def capture(self, tensors: Sequence[Tensor], structure: str) -> Capture:
        """Returns at once. Called by the thread whose current stream made the tensors."""
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if not devices:
            return Capture(tensors, structure)
        on_host = list(tensors)
        copied = []
        for device in devices:
            stream = self._side_stream(device)
            with torch.cuda.stream(stream):
                for number, tensor in enumerate(tensors):
                    if tensor.device == device:
                        on_host[number] = _queue_copy(tensor.detach(), stream)
                # Blocking: who waits for it sleeps instead of spinning.
                done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                copied.append(stream.record_event(done))
        return Capture(on_host, structure, copied=copied)

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream


def _queue_copy(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # Resolved on the device: torch would do it on the host, before the bytes are there.
    target.copy_(tensor.resolve_conj().resolve_neg(), non_blocking=True)
    # Its memory must not be given to others before the copy is done.
    tensor.record_stream(stream)
    return target


def _version(tensor: Tensor) -> int:
    """Inference tensors cannot be changed where it would matter, and have no counter."""
    return 0 if tensor.is_inference() else tensor._version


def _storage_bytes(tensors: Sequence[Tensor]) -> int:
    """What they keep in memory: a view keeps all that it is a view of."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
