"""`everstep simulate` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from command import everstep

SMALL = "simulate --preset gpt-1.3b --replicas 3 --stages 4 --microbatches 4"
DRAWN = f"{SMALL} --mtbf 2d --repair 6h --duration 4d"


def test_all_systems_stand_in_one_table() -> None:
    shown = everstep(f"{SMALL} --every 6h")
    assert shown.status == 0
    for name in ("everstep", "re-routing only", "oobleck", "bamboo", "torchft-like", "ideal"):
        assert f"\n{name} " in shown.stdout
    assert "restart, Young/Daly" in shown.stdout


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "1.html", tmp_path / "2.html"
    one = everstep(f"{DRAWN} --seed 5 --format json --report {first}")
    two = everstep(f"{DRAWN} --seed 5 --format json --report {second}")
    assert one.stdout == two.stdout
    assert first.read_bytes() == second.read_bytes()
    assert everstep(f"{DRAWN} --seed 6 --format json").stdout != one.stdout


def test_the_report_is_one_file_without_scripts_or_links(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    everstep(f"{DRAWN} --report {path}")
    text = path.read_text()
    assert text.count("<polygon") == 10  # nine systems and the nodes
    assert "<script" not in text
    assert "http" not in text


def test_json_has_every_promised_field() -> None:
    document = everstep(f"{DRAWN} --format json --price 2").json()
    promised = {
        *("system", "throughput", "fault_free_throughput", "useful_fraction", "steps_lost"),
        *("down_s", "rungs", "curve", "device_hours", "money", "does_not_fit"),
    }
    assert all(promised <= row.keys() for row in document["systems"])
    assert document["systems"][0]["money"] == pytest.approx(
        2 * document["systems"][0]["device_hours"]
    )


def test_many_seeds_give_intervals() -> None:
    shown = everstep(f"{DRAWN} --runs 3 --system everstep --system ideal")
    assert "means over 3 traces" in shown.stdout
    assert shown.stdout.count("±") == 8


def test_a_trace_file_is_read_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("3600,a,lost\n7200,a,joined\n86400,,end\n")
    document = everstep(
        f"{SMALL} --trace {path} --servers 12 --duration 5h --system everstep --format json"
    ).json()
    assert document["trace"]["losses"] == 1
    assert document["trace"]["hours"] == 5


def test_a_sweep_names_the_soonest_and_the_cheapest() -> None:
    shown = everstep(
        "simulate sweep --preset gpt-1.3b --nodes 8 --mtbf 5d --duration 2d --runs 1"
        " --stages 2,4 --microbatch-size 8"
    )
    assert shown.status == 0
    assert "soonest" in shown.stdout
    assert "cheapest" in shown.stdout
    assert "one more node" in shown.stdout


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("simulate --replicas 2", "give one of --preset, --profile"),
        (SMALL, "give one of --trace, --every, --mtbf"),
        (f"{SMALL} --every soon", "must be a time such as 90, 30m"),
        (f"{SMALL} --every 1h --system obleck", "did you mean oobleck?"),
        (f"{SMALL} --every 1h --set restart=3", "did you mean restart_s?"),
        (f"{SMALL} --every 1h --nodes 3", "12 workers need 12 nodes"),
        (f"{SMALL} --mtbf 1d --kind sometimes", "known are exponential"),
        (f"{SMALL} --every 1h --stages 99", "24 layers"),
        (f"{SMALL} --trace nowhere.csv", "--trace is nowhere.csv"),
    ],
)
def test_bad_input_is_one_line_and_status_2(flags: str, complaint: str) -> None:
    shown = everstep(flags)
    assert shown.status == 2
    assert complaint in shown.stderr
    assert shown.stderr.count("\n") == 1


def test_the_simulator_does_not_load_torch() -> None:
    import subprocess
    import sys

    program = (
        "import sys; sys.argv = 'everstep simulate --preset gpt-1.3b --replicas 2 --stages 2"
        " --microbatches 2 --every 12h'.split()\n"
        "from everstep.cli.main import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
