"""`everstep checkpoint ls, verify, export, import`, with the tools on the other side."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from command import everstep
from everstep.checkpoint.restore import newest
from everstep.checkpoint.state import flatten, unflatten
from orders import OrderedWriter
from states import state_of
from trees import is_same

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "ckpt"
    writer = OrderedWriter(path)
    for step in (1, 2):
        writer.save(step, state_of(step))
    return path


def trained() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def quietly(work: Any, *arguments: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work(*arguments, **options)


def damage(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_ls_shows_the_newest_first_and_what_is_incomplete(directory: Path) -> None:
    listed = everstep(f"checkpoint ls {directory}")
    assert listed.status == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["step", "2", "1"]
    (directory / "step-000000002" / "manifest.json").unlink()
    rows: Any = everstep(f"checkpoint ls {directory} --json").json()
    assert [row["step"] for row in rows] == [2, 1]
    assert "manifest.json" in rows[0]["problem"]
    assert rows[1]["tensors"] == 4


def test_verify_reads_every_byte(directory: Path) -> None:
    assert everstep(f"checkpoint verify {directory}").stdout == "step 2: good\nstep 1: good\n"
    damage(directory / "step-000000002" / "shard-00001-of-00001.safetensors")
    verified = everstep(f"checkpoint verify {directory}")
    assert verified.status == 1
    assert "does not match" in verified.stdout
    assert everstep(f"checkpoint verify {directory} --step 1").status == 0
    assert everstep(f"checkpoint verify {directory} --step 7").status == 2


def test_export_writes_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    tree = trained()
    OrderedWriter(tmp_path / "ckpt").save(3, flatten(tree))
    target = tmp_path / "weights.safetensors"
    exported = everstep(f"checkpoint export {tmp_path}/ckpt --to {target} --prefix model/")
    assert exported.stdout == f"{target}: 2 tensors of step 3\n"
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(safetensors.torch.load_file(target))
    assert torch.equal(model.weight, tree["model"]["weight"])


def test_export_takes_the_newest_that_verifies(directory: Path, tmp_path: Path) -> None:
    damage(directory / "step-000000002" / "shard-00001-of-00001.safetensors")
    exported = everstep(f"checkpoint export {directory} --to {tmp_path}/all.safetensors")
    assert "of step 1" in exported.stdout
    refused = everstep(f"checkpoint export {directory} --to {tmp_path}/x.safetensors --step 2")
    assert refused.status == 2
    assert "damaged" in refused.stderr


def test_dcp_reads_what_is_exported_and_what_it_writes_is_imported(tmp_path: Path) -> None:
    tree = trained()
    OrderedWriter(tmp_path / "ckpt").save(3, flatten(tree))
    assert everstep(f"checkpoint export {tmp_path}/ckpt --to {tmp_path}/dcp").status == 0
    blank = {"model": {name: torch.zeros_like(t) for name, t in tree["model"].items()}}
    quietly(load, blank, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(blank["model"]["weight"], tree["model"]["weight"])
    plain = {"model": dict(tree["model"]), "parts": [torch.ones(2), torch.zeros(3)], "step": 7}
    quietly(save, plain, checkpoint_id=tmp_path / "other", no_dist=True)
    assert everstep(f"checkpoint import {tmp_path}/other {tmp_path}/new --step 9").status == 0
    found = newest(tmp_path / "new")
    assert found is not None
    assert found.step == 9
    assert is_same(unflatten(found.read()), plain)


def test_a_file_of_torch_save_is_imported(tmp_path: Path) -> None:
    tree = trained()
    torch.save(tree, tmp_path / "state.pt")
    assert everstep(f"checkpoint import {tmp_path}/state.pt {tmp_path}/new").status == 0
    found = newest(tmp_path / "new")
    assert found is not None
    assert is_same(unflatten(found.read()), tree)


class _Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["EVERSTEP_TEST_CRATER"],)


def test_code_in_foreign_files_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crater = tmp_path / "crater"
    monkeypatch.setenv("EVERSTEP_TEST_CRATER", str(crater))
    torch.save({"a": _Bomb()}, tmp_path / "bomb.pt")
    quietly(save, {"a": torch.ones(2), "b": _Bomb()}, checkpoint_id=tmp_path / "byte", no_dist=True)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / ".metadata").write_bytes(pickle.dumps(_Bomb()))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".metadata").write_bytes(pickle.dumps([1]))
    for source in ("bomb.pt", "byte", "meta", "other"):
        refused = everstep(f"checkpoint import {tmp_path}/{source} {tmp_path}/new")
        assert refused.status == 2, source
        assert refused.stderr.startswith("everstep: cannot import"), refused.stderr
    assert not crater.exists()
    assert newest(tmp_path / "new") is None


def test_an_import_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "state.pt")
    (tmp_path / "file").write_text("")
    refused = everstep(f"checkpoint import {tmp_path}/state.pt {tmp_path}/file/ckpt")
    assert refused.status == 2
    assert "no checkpoint of step 0" in refused.stderr
