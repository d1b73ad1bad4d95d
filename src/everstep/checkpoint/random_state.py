"""The random state of a process as tensors and plain values: torch, CUDA, NumPy and `random`.

Covers the global generators, which dropout and most augmentations draw from. Generators that the
user made are their owner's to keep: those of loaders and samplers are (`batches`), others are not.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

RandomState: TypeAlias = Mapping[str, Any]
"""Tensors and plain values, fit for a checkpoint."""

_PACKED = struct.Struct("<qqdqqdq")


def capture_random() -> dict[str, Any]:
    """Everything that can be drawn from in this process without naming a generator."""
    state = {"torch": torch.get_rng_state(), **_capture_numpy(), **_capture_python()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states = torch.cuda.get_rng_state_all()
        state["cuda"] = {str(index): each for index, each in enumerate(states)}
    return state


def restore_random(state: RandomState) -> None:
    """Devices that are not here any more are passed over."""
    torch.set_rng_state(state["torch"])
    _restore_numpy(state)
    _restore_python(state)
    for index, each in state.get("cuda", {}).items():
        if int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(each, int(index))


def capture_drawn_from(generators: Iterable[torch.Generator]) -> dict[str, Any]:
    """The global generators and these: all that a loader can draw from."""
    return {"global": capture_random(), "own": [each.get_state() for each in generators]}


def restore_drawn_from(generators: Iterable[torch.Generator], state: RandomState) -> None:
    restore_random(state["global"])
    for generator, own in zip(generators, state["own"], strict=True):
        generator.set_state(own)


def pack_random() -> bytes:
    """The state of a DataLoader's worker, small and quick to send: about 10 kB."""
    _, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, python_words, python_gauss = random.getstate()
    head = _PACKED.pack(
        position,
        has_gauss,
        gauss,
        version,
        python_gauss is not None,
        python_gauss or 0.0,
        len(python_words),
    )
    python_bytes = np.array(python_words, dtype="<u4").tobytes()
    numpy_bytes = np.asarray(words, dtype="<u4").tobytes()
    return head + python_bytes + numpy_bytes + torch.get_rng_state().numpy().tobytes()


def unpack_random(packed: bytes) -> None:
    """Puts this process into the state that was packed."""
    position, has_gauss, gauss, version, has_python_gauss, python_gauss, length = (
        _PACKED.unpack_from(packed)
    )
    python_end = _PACKED.size + 4 * length
    numpy_end = python_end + 4 * 624
    words = np.frombuffer(packed[_PACKED.size : python_end], dtype="<u4")
    numpy_words = np.frombuffer(packed[python_end:numpy_end], dtype="<u4")
    random.setstate((version, tuple(map(int, words)), python_gauss if has_python_gauss else None))
    np.random.set_state(("MT19937", numpy_words, position, has_gauss, gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(packed[numpy_end:]), dtype=torch.uint8))


def _capture_numpy() -> dict[str, Any]:
    _, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "numpy": torch.from_numpy(np.asarray(words, dtype=np.uint32).view(np.int32).copy()),
        "numpy_rest": [int(position), int(has_gauss), float(gauss)],
    }


def _restore_numpy(state: RandomState) -> None:
    words = state["numpy"].numpy().view(np.uint32)
    np.random.set_state(("MT19937", words, *state["numpy_rest"]))


def _capture_python() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    tensor = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
    return {"python": tensor, "python_rest": [version, gauss]}


def _restore_python(state: RandomState) -> None:
    version, gauss = state["python_rest"]
    words = state["python"].numpy().view(np.uint32)
    random.setstate((version, tuple(map(int, words)), gauss))
