"""What the command prints, kept as files. Regenerate with EVERSTEP_REGENERATE=1 and review."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from command import SHAPE_3X4X6, everstep

EXPECTED = Path(__file__).parent / "expected"

LOGGING_8 = (
    "plan --replicas 1 --stages 8 --microbatches 16 --interval 200 --load 4"
    " --replay 1.1,1,1,1,1,1,1,1.3 --boundary-bytes 2MB,2MB,2MB,2MB:1MB,2MB,2MB,2MB"
)

PICTURES = {
    "plan-no-loss.txt": SHAPE_3X4X6,
    "plan-one-loss.txt": f"{SHAPE_3X4X6} --lost 1:2",
    "plan-three-losses.txt": f"{SHAPE_3X4X6} --lost 1:2 --lost 0:1 --lost 2:3",
    "plan-unequal.txt": "plan --replicas 2 --stages 2 --microbatches 2 --durations 1,0.5,1.5",
    "plan-one-loss.svg": f"{SHAPE_3X4X6} --lost 1:2 --format svg",
    "plan-small.json": "plan --replicas 2 --stages 2 --microbatches 2 --lost 0:1 --format json",
    "plan-logging.txt": f"{LOGGING_8} --logging 2500MB",
    "plan-logging.svg": f"{LOGGING_8} --logging 2500MB --format svg",
    "help.txt": "--help",
    "help-plan.txt": "plan --help",
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_output_is_the_recorded_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    shown = everstep(PICTURES[name])
    assert shown.status == 0, shown.stderr
    path = EXPECTED / name
    if os.environ.get("EVERSTEP_REGENERATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown.stdout, encoding="utf-8")
    assert shown.stdout == path.read_text(encoding="utf-8")
