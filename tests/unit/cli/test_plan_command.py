from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command import SHAPE_3X4X6, everstep

SMALL = "plan --replicas 2 --stages 2 --microbatches 2"

BAD_INPUT = {
    f"{SMALL} --lost 5:1": "lost is 5:1: there is no such worker in 2 replicas x 2 stages",
    f"{SMALL} --lost 1": "--lost is 1: must be REPLICA:STAGE",
    f"{SMALL} --lost 0:1 --lost 1:1": "stage 1 has no live worker: all 2 are lost",
    f"{SMALL} --durations 1,1": "--durations is 1,1: must be F,B,W",
    f"{SMALL} --durations 1,-1,1": "must be a finite number, not negative",
    f"{SMALL} --durations nan,1,1": "must be a finite number, not negative",
    f"{SMALL} --durations 0,0,0": "a stage must take some time",
    f"{SMALL} --in-flight 1,2,3": "in_flight is 1,2,3: must be one number for all",
    f"{SMALL} --in-flight 0": "in_flight is 0: must be at least 1",
    f"{SMALL} --in-flight many": "--in-flight is many",
    f"{SMALL} --variant fastest": "--variant",
    f"{SMALL} --variant one-f-one-b --lost 0:0": "1F1B knows no lost workers",
    f"{SMALL} --profile nowhere.json": "--profile is nowhere.json",
    f"{SMALL} --prepare 1": "--prepare needs a directory",
    f"{SMALL} --exact -1": "--exact is -1.0: must not be negative",
    f"{SMALL} --colour red": "--colour",
    "plan --replicas 0 --stages 2 --microbatches 2": "replicas is 0: must be at least 1",
    "plan --replicas 2 --stages -1 --microbatches 2": "stages is -1: must be at least 1",
    "plan --replicas 2 --stages 2 --microbatches 0": "microbatches is 0: must be at least 1",
    "plan --replicas two --stages 2 --microbatches 2": "--replicas",
    "plan --stages 2 --microbatches 2": "--replicas",
    "fly": "fly",
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_is_one_clear_line_and_status_2(command: str) -> None:
    finished = everstep(command)
    assert finished.status == 2
    assert finished.stdout == ""
    assert finished.stderr.count("\n") == 1
    assert BAD_INPUT[command] in finished.stderr


def test_a_profile_gives_each_stage_its_durations_and_limit(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(
        json.dumps(
            {
                "stages": [
                    {"forward": 1, "input_gradient": 0, "weight_gradient": 2, "in_flight": 3},
                    {"forward": 2, "input_gradient": 2, "weight_gradient": 2},
                ],
                "transfer": 0.2,
                "optimizer": 0.5,
            }
        )
    )
    made = everstep(f"{SMALL} --profile {profile} --format json").json()
    assert made["in_flight"] == [3, None]
    assert made["durations"]["stages"][0]["input_gradient"] == 0
    assert made["durations"]["transfer"] == 0.2
    assert made["period"] >= made["lower_bound"] >= made["load_bound"]


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ("{", "profile is no JSON at line 1"),
        ("[]", "profile is []: must be an object"),
        ('{"stages": []}', "must be a list with one object per stage"),
        ('{"stages": [{"forwards": 1}]}', "did you mean forward?"),
        ('{"stage": []}', "profile.stage is not a known key: did you mean stages?"),
        ('{"stages": [{"forward": "x"}]}', "profile.stages[0].forward is x: must be a number"),
    ],
)
def test_a_bad_profile_says_where_it_is_bad(tmp_path: Path, document: str, complaint: str) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(document)
    finished = everstep(f"{SMALL} --profile {profile}")
    assert finished.status == 2
    assert complaint in finished.stderr


def test_prepare_writes_a_plan_for_every_loss_up_to_the_names_of_replicas(tmp_path: Path) -> None:
    finished = everstep(f"{SHAPE_3X4X6} --prepare 2 --out {tmp_path}")
    # None; one of 4 stages; two in one replica (6 pairs) or in two replicas (10 pairs).
    assert finished.stdout.startswith("21 plans in ")
    assert len(list(tmp_path.glob("*.json"))) == 21


def test_out_writes_the_picture_to_a_file(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    finished = everstep(f"{SMALL} --format svg --out {picture}")
    assert finished.stdout == ""
    assert picture.read_text().startswith("<svg ")


def test_the_planner_never_loads_torch() -> None:
    """It must start fast and run where torch is not installed."""
    program = (
        "import sys; import everstep.cli.main, everstep.schedule.planner, everstep.schedule.store;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 0
