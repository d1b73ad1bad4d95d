"""A coordinator and two agents at three addresses: one job, looked at while it runs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import slow_job
from command import Finished, everstep
from live import Live, command, of, read_events

TOKEN = "correct-horse"
AGENTS = ("127.0.0.3", "127.0.0.4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What was seen of the job."""

    refused: tuple[int, str]
    """An agent with a wrong token: its exit status and output."""

    status: dict[str, Any]
    text: Finished
    newest: Finished
    wrong: Finished
    """`status`: as JSON, for readers, without an address, and with a wrong token."""

    ends: list[tuple[int, str]]
    """Of the coordinator and the agents."""

    left_behind: list[int]
    events: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("agents")
    events, go, out = folder / "events.jsonl", folder / "go", folder / "weights.pt"
    shape = ("--replicas", 2, "--stages", 2)
    variables = {"XDG_RUNTIME_DIR": str(folder), "EVERSTEP_JOB_TOKEN": TOKEN}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        bind = ("--host", "127.0.0.2", "--events", events)
        coordinator = Live(command("coordinator", *shape, *bind), variables=variables)
        stack.enter_context(coordinator)
        (started,) = coordinator.wait_events(events, "started", 1)
        address = started["address"]
        join = ("agent", "--join", address, "--workers", 2)
        script = (slow_job.__file__, go, out)
        with Live(command(*join, "--token", "wrong", *script)) as stranger:
            refused = stranger.wait()
        agents = [
            stack.enter_context(Live(command(*join, "--host", host, *script), variables=variables))
            for host in AGENTS
        ]
        coordinator.wait_events(events, "step", slow_job.WAITS_AFTER + 1)
        at = f"status --at {address}"
        as_json = everstep(f"{at} --token {TOKEN} --json")
        text, newest = everstep(f"{at} --token {TOKEN}"), everstep("status --json")
        wrong = everstep(f"{at} --token wrong")
        go.touch()
        ends = [live.wait() for live in (coordinator, *agents)]
        left_behind = [pid for live in (coordinator, *agents) for pid in live.left_behind()]
    return Trained(
        refused=refused,
        status=as_json.json(),
        text=text,
        newest=newest,
        wrong=wrong,
        ends=ends,
        left_behind=left_behind,
        events=read_events(events),
        weights=torch.load(out, weights_only=True),
    )


def test_agents_at_other_addresses_train_one_job_to_its_end(trained: Trained) -> None:
    assert [status for status, _ in trained.ends] == [0, 0, 0], trained.ends
    assert [event["step"] for event in of(trained.events, "step")] == list(range(slow_job.STEPS))
    hosts = [joined["host"] for joined in of(trained.events, "worker_joined")]
    assert sorted(hosts) == sorted(AGENTS * 2)
    assert trained.left_behind == []


def test_a_wrong_token_is_refused_with_the_reason(trained: Trained) -> None:
    status, output = trained.refused
    assert status == 2
    assert "refused the connection (401): the token is not this coordinator's" in output
    assert "Traceback" not in output
    assert TOKEN not in output
    assert trained.wrong.status == 2
    assert "the token is not this coordinator's" in trained.wrong.stderr


def test_status_shows_each_worker_the_generation_and_the_plan(trained: Trained) -> None:
    status = trained.status
    assert (status["replicas"], status["stages"], status["steps"]) == (2, 2, slow_job.STEPS)
    assert status["generation"] == 1
    assert status["finished_step"] == slow_job.WAITS_AFTER
    assert status["plan"]["unit"] == "seconds"
    assert status["plan"]["period"] >= status["plan"]["bound"] > 0
    joined = of(trained.events, "worker_joined")
    expected = {(each["replica"], each["stage"], each["pid"], each["host"]) for each in joined}
    found = {(w["replica"], w["stage"], w["pid"], w["host"]) for w in status["workers"]}
    assert found == expected
    assert {worker["state"] for worker in status["workers"]} == {"training"}
    assert {worker["step"] for worker in status["workers"]} == {slow_job.WAITS_AFTER}
    for worker in status["workers"]:
        assert f"{worker['replica']}:{worker['stage']}" in trained.text.stdout
        assert str(worker["pid"]) in trained.text.stdout


def test_status_finds_the_newest_job_of_this_machine_and_its_token(trained: Trained) -> None:
    assert trained.newest.status == 0, trained.newest.stderr
    assert trained.newest.json()["address"] == trained.status["address"]


def test_a_slow_dataset_shows_as_its_own_time(trained: Trained) -> None:
    """Without an absolute number: computing and updating this little takes less than waiting."""
    breakdowns = [event["breakdown"] for event in of(trained.events, "step")]
    total = {kind: sum(each[kind] for each in breakdowns[2:]) for kind in breakdowns[0]}
    others = ("forward", "input_gradient", "weight_gradient", "optimizer")
    assert all(total["data"] > total[kind] for kind in others), total


def test_bf16_learns_and_its_parameters_stay_in_fp32(trained: Trained) -> None:
    losses = [event["loss"] for event in of(trained.events, "step")]
    assert losses[-1] < 0.8 * losses[0]
    assert {value.dtype for value in trained.weights.values()} == {torch.float32}
    slow_job.model().load_state_dict(trained.weights)
