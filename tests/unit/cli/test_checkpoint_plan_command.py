from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from command import everstep

PLAN = "checkpoint plan --cost 0.5 --rate 3 --step-time 2"


@pytest.fixture
def loss_csv(tmp_path: Path) -> Path:
    path = tmp_path / "run.csv"
    rows = [f"{step},{1 + 2 * math.exp(-step / 100)}" for step in range(500)]
    path.write_text("\n".join(["step,loss", *rows, ""]))
    return path


def test_the_table_shows_every_policy_and_what_it_costs(loss_csv: Path) -> None:
    table = everstep(f"{PLAN} --loss-csv {loss_csv} --epoch 100").stdout
    for policy in ("LostProgress", "WallClock", "YoungDaly", "CheckFreq", "PerEpoch", "evenly"):
        assert policy in table
    assert "500 steps of 2 s, a checkpoint stalls 0.5 s, 3 failures per hour" in table


def test_the_json_names_the_steps_and_the_default_loses_less_progress(loss_csv: Path) -> None:
    document = everstep(f"{PLAN} --loss-csv {loss_csv} --format json").json()
    by_name = {policy["policy"]: policy for policy in document["policies"]}
    ours, even = by_name["LostProgress (default)"], by_name["as many, evenly"]
    best = by_name["best with hindsight"]
    assert ours["steps"] == sorted(set(ours["steps"]))
    assert ours["stall_seconds"] <= 0.035 * 1000
    losses = [p["expected_lost_progress_fraction"] for p in (best, ours, even)]
    assert losses == sorted(losses)
    assert ours["expected_lost_work_seconds"] > even["expected_lost_work_seconds"]


def test_the_picture_is_an_svg_with_a_mark_for_each_save(loss_csv: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    everstep(f"{PLAN} --loss-csv {loss_csv} --format svg --out {picture}")
    document = everstep(f"{PLAN} --loss-csv {loss_csv} --format json").json()
    paths = ElementTree.parse(picture).findall("{http://www.w3.org/2000/svg}path")
    drawn = [path.get("d", "").count("M") for path in paths]
    assert drawn == [len(p["steps"]) for p in document["policies"] if p["steps"]]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--cost 0", "--cost is 0.0: must be more than 0 seconds"),
        ("--cost 1 --rate 0", "--rate is 0.0: must be failures per hour, above 0"),
        ("--cost 1 --step-time -1", "--step-time is -1.0: must be more than 0 seconds"),
        ("--cost 1 --workers 0", "--workers is 0: must be at least 1"),
        ("--cost 1 --epoch -1", "--epoch is -1: must be at least 1"),
        ("--cost 1 --durable -1", "--durable is -1.0: must not be negative"),
        ("--cost 1 --budget 2", "budget is 2.0: must be a share of time"),
    ],
)
def test_numbers_that_make_no_sense_are_one_line_and_exit_status_2(
    loss_csv: Path, flags: str, complaint: str
) -> None:
    ended = everstep(f"checkpoint plan --loss-csv {loss_csv} {flags}")
    assert ended.status == 2
    assert complaint in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("step,value\n1,2\n", "must have a column named `loss`"),
        ("step,loss\n1,much\n", "every loss must be a number"),
        ("step,loss\n1,2.0\n2,nan\n", "at least 2 losses, all of them finite"),
        ("", "must have a column named `loss`"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(
    tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    ended = everstep(f"checkpoint plan --cost 1 --loss-csv {path}")
    assert ended.status == 2
    assert complaint in ended.stderr
