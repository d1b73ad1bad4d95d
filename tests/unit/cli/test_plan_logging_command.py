from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from command import everstep

SHAPE = "plan --replicas 1 --stages 4 --microbatches 8"
COSTS = "--boundary-bytes 1MB --interval 20 --replay 8 --helpers 3"
LOGGING = f"{SHAPE} {COSTS} --logging"


def test_the_json_has_the_whole_curve_and_the_choice() -> None:
    document = everstep(f"{LOGGING} 50MB --format json").json()
    assert document["budget_bytes"] == 50_000_000
    chosen = document["curve"][document["chosen"]]
    assert chosen == {
        "bytes": 40_000_000,
        "bytes_fraction": pytest.approx(1 / 3),
        "expected_seconds": 40.0,
        "groups": [[0, 1], [2, 3]],
        "recovery_seconds": [40.0, 40.0],
        "logged": [1],
    }
    first, last = document["curve"][0], document["curve"][-1]
    assert (first["bytes"], first["groups"]) == (0, [[0, 1, 2, 3]])
    assert (last["bytes_fraction"], last["logged"]) == (1.0, [0, 1, 2])


def test_all_chooses_the_fastest_recovery() -> None:
    document = everstep(f"{LOGGING} all --format json").json()
    assert document["budget_bytes"] is None
    assert document["chosen"] == len(document["curve"]) - 1


def test_the_table_marks_the_choice() -> None:
    table = everstep(f"{LOGGING} 50MB").stdout
    (chosen,) = [line for line in table.splitlines() if "chosen" in line]
    assert chosen.split()[:2] == ["40", "MB"]
    assert "0-1 2-3" in chosen
    assert "10 replayed on average, budget 50 MB" in table


def test_a_long_curve_is_cut_in_the_table_only() -> None:
    sizes = ",".join(f"{2**number}" for number in range(11))
    command = f"plan --replicas 1 --stages 12 --microbatches 8 --boundary-bytes {sizes}"
    command += " --interval 20 --replay 8 --logging all"
    num_points = len(everstep(f"{command} --format json").json()["curve"])
    assert num_points > 24
    table = everstep(command).stdout
    assert f" of {num_points} points" in table
    assert table.count("%") <= 24


def test_durations_and_a_profile_say_what_replay_would(tmp_path: Path) -> None:
    common = f"{SHAPE} --boundary-bytes 1MB --interval 20 --helpers 0 --logging all --format json"
    by_replay = everstep(f"{common} --replay 8").json()
    assert everstep(f"{common} --durations 0.25,0.5,0.25").json() == by_replay
    profile = tmp_path / "profile.json"
    stage = '{"forward": 0.25, "input_gradient": 0.5, "weight_gradient": 0.25}'
    profile.write_text(f'{{"stages": [{stage}, {stage}, {stage}, {stage}]}}')
    assert everstep(f"{common} --profile {profile}").json() == by_replay


def test_each_boundary_and_direction_may_have_its_own_size() -> None:
    sizes = "--boundary-bytes 1MB,2MB:1MB,0"
    command = f"{SHAPE} {sizes} --interval 1 --replay 8 --logging all --format json"
    assert everstep(command).json()["curve"][-1]["bytes"] == 5_000_000


def test_loading_and_failures_count() -> None:
    command = f"{LOGGING} 40MB --load 5 --failures 100,1,1,1 --format json"
    document = everstep(command).json()
    chosen = document["curve"][document["chosen"]]
    assert chosen["groups"] == [[0], [1, 2, 3]]
    assert chosen["recovery_seconds"] == [25.0, 75.0]


def test_the_picture_is_an_svg_file(tmp_path: Path) -> None:
    picture = tmp_path / "logging.svg"
    assert everstep(f"{LOGGING} 50MB --format svg --out {picture}").stdout == ""
    assert "budget 50 MB" in "".join(ElementTree.parse(picture).getroot().itertext())


BAD_INPUT = {
    f"{LOGGING} much": "--logging is much: must be a size such as",
    f"{LOGGING} -1": "--logging",
    f"{LOGGING} 1GB --lost 0:1": "--lost is 0:1: means nothing with --logging",
    f"{LOGGING} 1GB --prepare 1": "--prepare is 1: means nothing with --logging",
    f"{LOGGING} 1GB --durations 1,1,1": "--replay is 8: the durations say it already",
    f"{SHAPE} --interval 20": "--interval is 20: means something only with --logging",
    f"{SHAPE} --helpers 0": "--helpers is 0: means something only with --logging",
    f"{SHAPE} --logging 1GB": "--interval is not given: --logging needs",
    f"{SHAPE} --logging 1GB --interval 9": "--replay is not given: --logging needs",
    f"{SHAPE} --logging 1GB --interval 9 --replay 1": "--boundary-bytes is not given",
    f"{LOGGING} 1GB --interval 0": "--interval is 0: must be at least 1",
    f"{LOGGING} 1GB --helpers -1": "--helpers is -1: must not be negative",
    f"{LOGGING} 1GB --replay 1,2": "--replay is 1,2: must be one for all, or one for each of 4",
    f"{LOGGING} 1GB --replay 1,2,3,x": "--replay is 1,2,3,x: must be a number, or one per stage",
    f"{LOGGING} 1GB --load inf": "--load is inf: must be finite",
    f"{LOGGING} 1GB --failures 0": "--failures is 0: one of them must be above 0",
    f"{LOGGING} 1GB --boundary-bytes 1MB,2MB": "must be one for all, or one for each of 3 bound",
    f"{LOGGING} 1GB --boundary-bytes 1MB:": "--boundary-bytes is 1MB:: must be sizes such as",
    f"plan --replicas 1 --stages 0 --microbatches 8 {COSTS} --logging 1GB": "--stages is 0",
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_about_logs_is_one_clear_line_and_status_2(command: str) -> None:
    finished = everstep(command)
    assert finished.status == 2
    assert finished.stdout == ""
    assert finished.stderr.count("\n") == 1
    assert BAD_INPUT[command] in finished.stderr
