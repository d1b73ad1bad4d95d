"""A stage's state under the names of the whole model, so that another number of stages can load it.

    {"model": {"0.weight": T, ...},
     "optimizer": {"state": {"0.weight": {"exp_avg": T, ...}}, "groups": [{"lr": 3e-4, ...}]},
     "scheduler": {"last_epoch": 7, ...}}

Knows no files. What all stages have alike (groups, scheduler) is taken from any of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.core.errors import NotInCheckpoint
from everstep.execute.split import StageModule

Tree = dict[str, Any]


class StageTree:
    def __init__(
        self, module: StageModule, optimizer: Optimizer | None, scheduler: LRScheduler | None
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._scheduler = scheduler

    def tree(self) -> Tree:
        """The tensors themselves, not copies."""
        tree: Tree = {"model": self._module.state_dict()}
        if self._optimizer is not None:
            tree["optimizer"] = self._optimizer_tree(self._optimizer)
        if self._scheduler is not None:
            tree["scheduler"] = self._scheduler.state_dict()
        return tree

    def places(self) -> dict[str, Tensor]:
        """Where the model's tensors of a checkpoint belong, by their names in it."""
        return {f"model/{name}": tensor for name, tensor in self._module.state_dict().items()}

    @property
    def moving_names(self) -> list[str]:
        """Of buffers: a forward pass may change them."""
        module = self._module
        buffers = {key for key, _ in module.module.named_buffers()}
        return [f"model/{name}" for key, name in module.names.items() if key in buffers]

    def is_mine(self, tensor_name: str) -> bool:
        """Whether a tensor of a checkpoint is of this stage."""
        kind, _, rest = tensor_name.partition("/")
        names = set(self._module.names.values())
        if kind == "optimizer":
            return rest.removeprefix("state/").rpartition("/")[0] in names
        return kind != "model" or rest in names

    def load(self, tree: Tree, *, source: str) -> None:
        """`tree` may hold other stages' parts, too; what is missing of this one's raises, before
        anything is changed."""
        model = tree["model"]
        missing = [name for name in self._module.names.values() if model.get(name) is None]
        if missing:
            raise NotInCheckpoint(missing[0], checkpoint=source, why="this job's model has it")
        with torch.no_grad():
            for name, tensor in self._module.state_dict().items():
                if tensor.data_ptr() != model[name].data_ptr():  # else it was read into its place
                    tensor.copy_(model[name])
        if self._optimizer is not None:
            self._load_optimizer(self._optimizer, tree["optimizer"])
        if self._scheduler is not None and "scheduler" in tree:
            self._scheduler.load_state_dict(tree["scheduler"])

    def _optimizer_tree(self, optimizer: Optimizer) -> Tree:
        state = optimizer.state_dict()
        names = [name for name, _ in self._named_params(optimizer)]
        return {
            "state": {names[number]: entries for number, entries in state["state"].items()},
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in state["param_groups"]
            ],
        }

    def _load_optimizer(self, optimizer: Optimizer, tree: Tree) -> None:
        state = optimizer.state_dict()
        names = [name for name, _ in self._named_params(optimizer)]
        saved = tree["state"]
        groups = [
            {**group, **theirs}
            for group, theirs in zip(state["param_groups"], tree["groups"], strict=True)
        ]
        optimizer.load_state_dict(
            {
                "state": {number: saved[n] for number, n in enumerate(names) if n in saved},
                "param_groups": groups,
            }
        )

    def _named_params(self, optimizer: Optimizer) -> Iterator[tuple[str, Parameter]]:
        """In the order in which optimizers number them."""
        names = {
            param: self._module.names[key]
            for key, param in self._module.module.named_parameters(remove_duplicate=False)
        }
        for group in optimizer.param_groups:
            for param in group["params"]:
                yield names[param], param
