"""What is saved: the model, the optimizer and whatever else has a `state_dict`, by name.

Knows which tensors stand still until an optimizer's next step, so that they can be copied while
forward and backward run, and which are equal on all ranks, so that they are written once. Whether
a saved state fits is decided before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from everstep.core.errors import CheckpointMismatch, ConfigError

Tree: TypeAlias = dict[str, Any]


class Subjects:
    def __init__(
        self,
        things: Mapping[str, Any],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        replicated: Collection[str] = (),
    ) -> None:
        """`replicated`: modules alike on all ranks, beside those in DistributedDataParallel."""
        _check_things(things)
        modules = {
            name
            for name, thing in things.items()
            if name in replicated or isinstance(thing, DistributedDataParallel)
        }
        self._rank = rank
        self._things = {name: _unwrap(thing) for name, thing in things.items()}
        self._shared = _shared_names(things, modules) if num_ranks > 1 else set(things)
        # Between two forward passes the buffers of a replicated model differ: each rank's batch
        # has gone into its own. Rank 0's are the model's, the others' are kept beside it.
        self._buffers = {
            name: {key for key, _ in self._things[name].named_buffers()} for name in modules
        }
        self.optimizers = [each for each in self._things.values() if isinstance(each, Optimizer)]

    # Saving.

    def capture(self) -> tuple[Tree, Tree]:
        """What all ranks hold alike, and what is this rank's own."""
        shared: Tree = {}
        own: Tree = {}
        for name, thing in self._things.items():
            state = thing.state_dict()
            if name not in self._shared:
                own[name] = state
                continue
            shared[name] = state
            if self._rank > 0 and (buffers := self._buffers.get(name)):
                own[name] = {key: state.pop(key) for key in list(state) if key in buffers}
        return shared, own

    def private_names(self) -> set[str]:
        """Names among the shared ones whose tensors are this rank's alone to write."""
        if self._rank > 0:
            return set()
        return {f"{name}/{key}" for name, keys in self._buffers.items() for key in keys}

    def still_names(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Names of tensors that change in nothing but an optimizer's step."""
        places = {
            tensor.data_ptr()
            for optimizer in self.optimizers
            for parameter in _parameters(optimizer)
            for tensor in (parameter, *optimizer.state.get(parameter, {}).values())
            if isinstance(tensor, Tensor) and tensor.numel() > 0
        }
        return {
            name
            for name, tensor in tensors.items()
            if tensor.numel() > 0 and tensor.data_ptr() in places
        }

    def kinds(self) -> dict[str, str]:
        """The class of each thing, for telling whether a checkpoint is of the same ones."""
        return {name: type(thing).__name__ for name, thing in self._things.items()}

    # Restoring.

    def restore(self, shared: Tree, own: Tree, *, kinds: Mapping[str, str], source: str) -> None:
        """`source` names the checkpoint in errors. Raises before anything is changed."""
        states = {name: _joined(shared.get(name), own.get(name)) for name in {**shared, **own}}
        if problems := list(self._problems(states, kinds)):
            raise CheckpointMismatch(source, problems=problems)
        for name, thing in self._things.items():
            thing.load_state_dict(states[name])

    def _problems(self, states: Tree, kinds: Mapping[str, str]) -> Iterator[str]:
        here = self.kinds()
        for name in here.keys() - states.keys():
            yield f"'{name}' was given and is not in the checkpoint"
        for name in states.keys() - here.keys():
            yield f"'{name}' is in the checkpoint and was not given"
        for name in here.keys() & states.keys():
            if kinds.get(name, here[name]) != here[name]:
                yield f"'{name}' is a {here[name]}, in the checkpoint a {kinds[name]}"
                continue
            thing = self._things[name]
            if isinstance(thing, nn.Module):
                yield from _module_problems(name, thing.state_dict(), states[name])
            elif isinstance(thing, Optimizer):
                yield from _optimizer_problems(name, thing, states[name])


def hook_updates(
    optimizers: Iterable[Optimizer], *, before: Callable[[], None] | None, after: Callable[[], None]
) -> Callable[[], None]:
    """Calls `before` and `after` around every step of these; returns what takes the hooks out."""
    handles = []
    for each in optimizers:
        if before is not None:
            handles.append(each.register_step_pre_hook(lambda *_: before()))
        handles.append(each.register_step_post_hook(lambda *_: after()))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _check_things(things: Mapping[str, Any]) -> None:
    if not things:
        raise ConfigError("Autosave", "given nothing to save", "give at least model=")
    for name, thing in things.items():
        if name in _RESERVED:
            raise ConfigError("Autosave", f"given {name}=", "that name is used inside checkpoints")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                what = f"a {type(thing).__name__}"
                raise ConfigError(f"Autosave.{name}", what, f"it has no {method}()")


_RESERVED = frozenset({"ranks", "kinds"})


def _unwrap(thing: Any) -> Any:
    """The thing that holds the state: names are then the same with and without a wrapper."""
    if isinstance(thing, DistributedDataParallel):
        return _unwrap(thing.module)
    # What torch.compile returns; asking for its class by name would import the whole compiler.
    if isinstance(thing, nn.Module) and thing._modules.get("_orig_mod") is not None:
        return _unwrap(thing._modules["_orig_mod"])
    # accelerate puts its optimizer around the real one, which is stepped and has the hooks.
    if isinstance(thing, Optimizer) and isinstance(
        inner := getattr(thing, "optimizer", None), Optimizer
    ):
        return inner
    return thing


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _shared_names(things: Mapping[str, Any], modules: set[str]) -> set[str]:
    """The replicated modules, and the optimizers of nothing but their parameters."""
    parameters = {id(p) for name in modules for p in things[name].parameters()}
    optimizers = {
        name
        for name, thing in things.items()
        if isinstance(thing, Optimizer)
        and all(id(parameter) in parameters for parameter in _parameters(_unwrap(thing)))
    }
    return modules | optimizers


def _joined(shared: Any, own: Any) -> Any:
    if shared is None:
        return own
    if own:
        shared.update(own)
    return shared


def _module_problems(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    for key in here.keys() - there.keys():
        yield f"{name} has '{key}', the checkpoint has not"
    for key in there.keys() - here.keys():
        yield f"the checkpoint has '{key}', {name} has not"
    for key, tensor in here.items():
        saved = there.get(key)
        if not isinstance(tensor, Tensor) or not isinstance(saved, Tensor):
            continue
        if tensor.shape != saved.shape:
            yield f"{name}'s '{key}' is {list(tensor.shape)}, in the checkpoint {list(saved.shape)}"
        elif tensor.dtype != saved.dtype:
            yield f"{name}'s '{key}' is {tensor.dtype}, in the checkpoint {saved.dtype}"


def _optimizer_problems(name: str, optimizer: Optimizer, there: Mapping[str, Any]) -> Iterator[str]:
    here = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in there["param_groups"]]
    if here != saved:
        yield f"{name} has groups of {here} parameters, in the checkpoint of {saved}"
