"""Times on the command line."""

from __future__ import annotations

import re

from everstep.core.errors import ConfigError

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(text: str, *, field: str) -> float:
    """`30m`, `6h`, `348d`, or plain seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise ConfigError(field, text, "must be a time such as 90, 30m, 6h or 2d")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


def seconds_or_none(text: str | None, *, field: str) -> float | None:
    return None if text is None else seconds(text, field=field)
