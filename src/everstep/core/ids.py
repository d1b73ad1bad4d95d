"""Names of the things everstep counts.

A worker is named by its place, `replica:stage`. Places last; the process that fills one does not.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from everstep.core.errors import ConfigError


class WorkerId(NamedTuple):
    """One place in the grid of replicas and stages. A tuple, because plans hold many of them."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"{self.replica}:{self.stage}"

    @classmethod
    def parse(cls, text: str, *, field: str) -> WorkerId:
        """Reads `1:2`; `field` names the input in the error."""
        match = re.fullmatch(r"(\d+):(\d+)", text.strip())
        if match is None:
            raise ConfigError(field, text, "must be REPLICA:STAGE, two whole numbers such as 1:2")
        return cls(int(match[1]), int(match[2]))
