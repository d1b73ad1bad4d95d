from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import everstep
from everstep.core.errors import ConfigError


def test_the_defaults_are_these() -> None:
    settings = everstep.Logging()
    assert settings.budget_bytes == 20 * 10**9
    assert settings.memory_bytes == 256 * 10**6
    assert settings.directory is None
    assert settings.helpers is None


def test_sizes_may_be_words_or_numbers() -> None:
    settings = everstep.Logging(budget=0, memory="1GiB", directory=Path("logs"), helpers=3)
    assert (settings.budget_bytes, settings.memory_bytes) == (0, 2**30)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"budget": "much"}, "Logging.budget is much: must be a size such as"),
    ({"budget": None}, "Logging.budget is None: must be a size such as"),
    ({"budget": -1}, "Logging.budget is -1: must be a size such as"),
    ({"memory": "0"}, "Logging.memory is 0: must be more than 0 bytes"),
    ({"directory": " "}, "Logging.directory is empty: must be a path"),
    ({"directory": 7}, "Logging.directory is 7: must be a path"),
    ({"directory": "s3://logs"}, "Logging.directory is s3://logs: must be on the worker's own"),
    ({"helpers": -1}, "Logging.helpers is -1: must be a whole number"),
    ({"helpers": 1.5}, "Logging.helpers is 1.5: must be a whole number"),
    ({"helpers": True}, "Logging.helpers is True: must be a whole number"),
]


@pytest.mark.parametrize(("fields", "complaint"), BAD)
def test_a_bad_setting_is_refused_when_it_is_made(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        everstep.Logging(**fields)
