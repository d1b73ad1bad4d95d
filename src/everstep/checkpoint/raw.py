"""Tensors as raw bytes: their memory, and the names safetensors has for their types."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


def has_name(dtype: torch.dtype) -> bool:
    return dtype in _NAMES


def dtype_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    return _TYPES[name]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as uint8."""
    # Not reshape: a single element may be contiguous with a stride that `view` turns down.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The CUDA device that memory for these is page-locked for; None: they need none."""
    return next((tensor.device for tensor in tensors if tensor.is_cuda), None)
