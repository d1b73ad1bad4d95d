"""Sizes as people write them: `20GB` into bytes, and bytes into `20 GB`."""

from __future__ import annotations

import re
from decimal import Decimal

from everstep.core.errors import ConfigError

_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_UNITS = {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS)} | {
    f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)
}
_RULE = "must be a size such as 256MB, 1.5GiB, 20GB or a number of bytes"


def parse_bytes(size: str | int, *, field: str) -> int:
    """`20GB` is 20 * 1000**3 bytes and `20GiB` 20 * 1024**3; a plain number is bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(size).strip().lower(), re.ASCII)
    unit = _UNITS.get(found[2] or "b") if found else None
    # A bool is an int to Python, but nobody means one byte by True.
    if found is None or unit is None or isinstance(size, bool):
        raise ConfigError(field, size, _RULE)
    num_bytes = Decimal(found[1]) * unit
    if num_bytes != int(num_bytes):
        raise ConfigError(field, size, "must be a whole number of bytes")
    return int(num_bytes)


def render_bytes(num_bytes: float) -> str:
    """Three digits and a decimal unit: `0 B`, `1.5 kB`, `20 GB`."""
    size, units = float(num_bytes), iter(_DECIMAL_UNITS)
    unit = next(units)
    # 999.5 would be shown as 1e+03.
    while size >= 999.5 and (larger := next(units, None)):
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}" if size < 999.5 else f"{size:.0f} {unit}"
