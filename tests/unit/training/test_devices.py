"""Which device a worker takes, and what sums its gradients."""

from __future__ import annotations

import pytest
import torch

import everstep
from everstep.core.errors import ConfigError
from everstep.launch.context import WorkerContext
from everstep.training.devices import choose_backend, take_device


def job(**fields: object) -> everstep.Job:
    return everstep.Job(
        model=lambda: torch.nn.Linear(1, 1),
        loss=torch.nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        dataset=range(8),
        batch_size=8,
        microbatches=1,
        **fields,  # type: ignore[arg-type]
    )


def worker(number: int, *, of: int) -> WorkerContext:
    return WorkerContext(
        coordinator="c:1", uid="u", number=number, host="h", local_number=number, num_local=of
    )


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)


@pytest.mark.usefixtures("four_devices")
def test_devices_are_dealt_out_to_the_workers_of_a_machine() -> None:
    found = [take_device(job(device="cuda"), worker(number, of=6)) for number in range(6)]
    assert [device.index for device in found] == [0, 1, 2, 3, 0, 1]
    assert take_device(job(device="cuda"), None) == torch.device("cuda", 0)
    assert take_device(job(device="cuda:2"), worker(0, of=1)) == torch.device("cuda", 2)
    assert take_device(job(), worker(3, of=4)) == torch.device("cpu")


@pytest.mark.usefixtures("four_devices")
def test_nccl_is_for_workers_with_devices_of_their_own() -> None:
    assert choose_backend(job(device="cuda"), worker(0, of=4)) == "nccl"
    assert choose_backend(job(device="cuda"), worker(0, of=5)) == "gloo"
    assert choose_backend(job(device="cuda:0"), worker(0, of=2)) == "gloo"
    assert choose_backend(job(), worker(0, of=1)) == "gloo"
    assert choose_backend(job(device="cuda", backend="nccl"), worker(0, of=8)) == "nccl"


def test_a_machine_without_the_device_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        take_device(job(device="cuda"), None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="this machine has 2, counted from 0"):
        take_device(job(device="cuda:2"), None)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"device": "gpu"}, "device is gpu: must be 'cpu', 'cuda'"),
        ({"device": None}, "device is None"),
        ({"backend": "mpi"}, "backend is mpi"),
        ({"backend": "nccl"}, "backend is nccl: works for device='cuda' only"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        job(**fields)
