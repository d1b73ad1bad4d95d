"""Has the C library keep the memory that a log gives back, for the messages that come next.

A log holds what was sent and lets go of many steps at once. If that memory went back to the kernel,
each message after it would begin in fresh pages, which the training thread waits for.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST_KEPT_BYTES = 32 << 20
"""Of one block; more goes back at once. The C library allows no more."""
_GROWTH_BYTES = 64 << 20
_MOST_BYTES = 2**31 - 1


def keep_freed_memory(most_bytes: int) -> None:
    """For the whole process. Where it is not glibc's, nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, min(most_bytes, _MOST_BYTES))
        mallopt(_TOP_PAD, _GROWTH_BYTES)
