"""Names, and what cannot be saved."""

from __future__ import annotations

import collections
import math

import pytest
import torch

from everstep.checkpoint.layout import Part
from everstep.checkpoint.state import flatten, unflatten
from everstep.core.errors import ConfigError, StateNotSavable


def test_the_picture_in_the_docstring_is_right() -> None:
    tensor = torch.ones(2)
    flat = flatten({"model": {"w": tensor}, "step": 3, "betas": (0.9, math.inf)})
    assert list(flat.tensors) == ["model/w"]
    assert flat.tensors["model/w"].data_ptr() == tensor.data_ptr()
    assert flat.plain == {
        "dict": {
            "model": {"dict": {"w": {"tensor": "model/w"}}},
            "step": 3,
            "betas": {"tuple": [0.9, {"float": "inf"}]},
        }
    }


def test_the_state_of_an_optimizer_has_readable_names() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    flat = flatten({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert "model/weight" in flat.tensors
    assert "optimizer/state/0/exp_avg" in flat.tensors


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(1, dtype=torch.complex128), "complex128"),
        ("\ud800", "not Unicode"),
        (lambda: 0, "function"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_path(value: object, kind: str) -> None:
    with pytest.raises(StateNotSavable, match="'a/1/b'") as error:
        flatten({"a": [0, {"b": value}]})
    assert kind in str(error.value)


def test_keys_that_look_alike_keep_their_own_tensors() -> None:
    tree = {0: torch.zeros(1), "0": torch.ones(1), "a": {"b": torch.ones(2)}, "a/b": torch.ones(3)}
    flat = flatten(tree)
    assert len(flat.tensors) == 4
    assert {key: value.numel() for key, value in unflatten(flat).items() if key != "a"} == {
        0: 1,
        "0": 1,
        "a/b": 3,
    }


def test_volatile_names_are_whole_words_of_the_path() -> None:
    tree = {"bn": {"mean": torch.ones(1)}, "bn2": {"mean": torch.ones(1)}, "w": torch.ones(1)}
    assert flatten(tree, volatile=["bn", "w"]).volatile == {"bn/mean", "w"}


def test_several_parts_need_a_run_they_agree_on() -> None:
    with pytest.raises(ConfigError, match="join old and new"):
        Part(0, 2)
    with pytest.raises(ConfigError, match="names a file"):
        Part(0, 2, run="a/b")
    with pytest.raises(ConfigError, match=r"0 \.\.\. 1"):
        Part(2, 2, run="a")
