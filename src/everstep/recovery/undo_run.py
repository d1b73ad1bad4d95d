"""Carries one undo out: sorts the tensors, checks all of them, then changes all of them.

Knows no formula: the rule has that. Nothing is changed before everything has been checked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from everstep.core.errors import CannotUndo, ConfigError
from everstep.recovery.undo_batches import (
    Batch,
    Bucket,
    BucketKey,
    Hyper,
    Member,
    State,
    numbers,
    pack_rows,
    scalar_values,
)
from everstep.recovery.undo_record import (
    StepRecord,
    restore_circumstances,
    restore_param,
    restore_state,
)
from everstep.recovery.undo_rule import AMPLIFICATION_LIMIT, PARAM, Rule
from everstep.recovery.undo_tally import CANCELLATION_LIMIT, Tally

KEEP_SOME = "keep copies of the missing tensors with remember(..., keep=Keep.MISSING)"
KEEP_ALL = "keep a copy of everything with remember(..., keep=Keep.EVERYTHING)"


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoReport:
    """What was taken back, and how well."""

    num_tensors: int
    num_elements: int
    num_from_copies: int
    """Tensors brought back to the bit, parameter and state, from kept copies."""
    largest_cancellation: float
    """The largest ratio of what the step added to a running sum of squares to what remained."""
    num_cancelled: int
    """Elements where that ratio passed the limit, so that little of the old sum came back."""
    amplification: float
    """How much the inverse magnified rounding, at worst; 1 where nothing had to be solved."""

    @property
    def warning(self) -> str | None:
        """A sentence when the result is less exact than usual."""
        if self.num_cancelled == 0:
            return None
        return (
            f"{self.num_cancelled} of {self.num_elements} second moments came back inexactly: the"
            f" gradient outweighed them up to {self.largest_cancellation:.2g} times"
            f" (limit {CANCELLATION_LIMIT:.0e})"
        )


class Undoing:
    """One undo: sorts the tensors, checks all of them, then changes all of them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        record: StepRecord | None,
        lr: float | Sequence[float] | None,
        rule: Rule | None,
    ) -> None:
        self.optimizer = optimizer
        self.record = record
        self.rule = rule
        if record is not None and record.optimizer is not optimizer:
            raise ConfigError("record", "of another optimizer", "it must be of this optimizer")
        if record is not None and len(record.groups) != len(optimizer.param_groups):
            raise self._cannot("a param group was added after the record was taken")
        self.lrs = _lrs(optimizer, lr)
        self.hypers = [self._hyper(index) for index in range(len(optimizer.param_groups))]
        self.tally = Tally()
        self.amplification = 1.0
        self.buckets: list[Bucket] = []

    def check(self) -> None:
        """Refuses what cannot be taken back; changes nothing."""
        for index, group in enumerate(self.optimizer.param_groups):
            kept = self._kept(index)
            if kept is None:
                continue
            params = [param for param in group["params"] if param.grad is not None]
            self.buckets += self._buckets(index, params, self._checked_rule(index, kept))
        for bucket in self.buckets:
            self._check_bucket(bucket)

    def run(self) -> UndoReport:
        """Changes everything that `check` has looked at, and puts copies back."""
        for bucket in self.buckets:
            self._invert(bucket)
        self.tally.settle()
        exact = self._restore_everything()
        if self.record is not None:
            restore_circumstances(self.record)
        for group, used in zip(self.optimizer.param_groups, self.lrs, strict=True):
            if used is not None:
                group["lr"] = group["lr"].fill_(used) if _is_tensor(group["lr"]) else used
        if not self.tally.is_finite:
            raise self._cannot(
                "a gradient holds NaN or infinity, and the step has destroyed what it reached",
                what_to_do=f"copy the state from elsewhere; next time {KEEP_ALL}",
            )
        params = [param for bucket in self.buckets for param, _ in bucket.members] + exact
        return UndoReport(
            num_tensors=len(params),
            num_elements=sum(param.numel() for param in params),
            num_from_copies=len(exact),
            largest_cancellation=self.tally.largest_cancellation,
            num_cancelled=self.tally.num_cancelled,
            amplification=self.amplification,
        )

    def _hyper(self, index: int) -> Hyper:
        group = self.optimizer.param_groups[index]
        hyper = numbers(group if self.record is None else self.record.groups[index])
        if self.lrs[index] is not None:
            hyper["lr"] = self.lrs[index]
        if hyper.get("nesterov") and hyper.get("foreach") is hyper.get("fused") is None:
            params = [param for param in group["params"] if param.grad is not None]
            _, hyper["foreach"] = _default_to_fused_or_foreach(params, differentiable=False)
        return hyper

    def _kept(self, index: int) -> frozenset[str] | None:
        return frozenset() if self.record is None else self.record.kept[index]

    def _checked_rule(self, index: int, kept: frozenset[str]) -> Rule:
        if self.rule is None:
            raise self._cannot("everstep knows no inverse of its step", what_to_do=KEEP_ALL)
        for obstacle in self.rule.obstacles(self.hypers[index]):
            if obstacle.is_certain and not kept.issuperset(obstacle.keep):
                raise self._cannot(obstacle.sentence)
        return self.rule

    def _buckets(self, index: int, params: list[Tensor], rule: Rule) -> list[Bucket]:
        """Sorts the stepped parameters of a group into buckets that share all that matters."""
        had_state = None if self.record is None else self.record.had_state
        states = [self.optimizer.state.get(param, {}) for param in params]
        # By columns: sorting a hundred rows took longer than a GPU needs for the undo itself.
        kinds = zip(
            [param.device for param in params],
            [param.dtype for param in params],
            self._scalars(states, rule),
            [tuple([n for n in rule.tensors if _is_tensor(state.get(n))]) for state in states],
            [had_state is not None and id(param) not in had_state for param in params],
            strict=True,
        )
        members: dict[tuple[Any, ...], list[Member]] = defaultdict(list)
        for kind, param, state in zip(kinds, params, states, strict=True):
            members[kind].append((param, state))
        return [self._bucket(index, BucketKey(*kind), alike) for kind, alike in members.items()]

    def _bucket(self, index: int, key: BucketKey, members: list[Member]) -> Bucket:
        assert self.rule is not None
        if any(param.grad is not None and param.grad.is_sparse for param, _ in members):
            raise self._cannot("a gradient is sparse", what_to_do=KEEP_ALL)
        return Bucket(
            group=index,
            key=key,
            hyper=self.hypers[index],
            scalars=dict(zip(self.rule.scalars, key.scalars, strict=True)),
            members=members,
            packs=pack_rows(key, members, whole=self.rule.needs_whole_tensors),
        )

    def _scalars(self, states: list[State], rule: Rule) -> list[tuple[float, ...]]:
        """The scalars of each state, in the order in which the rule names them."""
        for name in rule.scalars:
            if any(name not in state for state in states):
                raise self._cannot(f"a parameter has no {name} in its state: no step to undo")
        columns = [scalar_values(states, name) for name in rule.scalars]
        return list(zip(*columns, strict=True)) if columns else [()] * len(states)

    def _check_bucket(self, bucket: Bucket) -> None:
        assert self.rule is not None
        if bucket.scalars.get("step", 1.0) < 1:
            raise self._cannot("its step counter is at 0: no step to undo")
        if self.rule.was_first is not None and bucket.hyper["momentum"] and not bucket.key.tensors:
            raise self._cannot("a parameter has no momentum buffer: no step to undo")
        if self.rule.amplification is not None and not self._has_params(bucket):
            for batch in self._batches(bucket):
                self.amplification = max(self.amplification, self.rule.amplification(batch))
        if self.amplification > AMPLIFICATION_LIMIT:
            raise self._cannot(
                f"the inverse would magnify rounding {self.amplification:.3g} times"
                f" (limit {AMPLIFICATION_LIMIT:.0f})"
            )

    def _has_params(self, bucket: Bucket) -> bool:
        return PARAM in (self._kept(bucket.group) or ())

    def _batches(self, bucket: Bucket) -> Iterator[Batch]:
        return bucket.batches(has_params=self._has_params(bucket), tally=self.tally)

    def _invert(self, bucket: Bucket) -> None:
        assert self.rule is not None
        if self.record is not None and self._has_params(bucket):
            for param, _ in bucket.members:
                restore_param(param, self.record.copies[id(param)])
        for batch in self._batches(bucket):
            if batch.is_first or not self.rule.notes_cancellation:
                self.tally.note_finite(batch.grads)
            self.rule.invert(batch)
        self._restore_state(bucket, self.rule)

    def _restore_state(self, bucket: Bucket, rule: Rule) -> None:
        """Sets counters back and drops state that did not exist before the step."""
        if bucket.key.is_new or (bucket.is_first and rule.first_state is None):
            for param, _ in bucket.members:
                self.optimizer.state.pop(param, None)
            return
        for name, value in rule.previous(bucket.hyper, bucket.scalars).items():
            _set_scalars(bucket.members, name, value)
        if bucket.is_first and rule.first_state is not None:
            for name, value in rule.first_state(bucket.hyper).items():
                for _, state in bucket.members:
                    _fill(state[name], value)
        if self.record is None:
            self._drop_first(bucket, rule)
        elif self._kept(bucket.group):
            for param, state in bucket.members:
                restore_state(state, self.record.copies[id(param)], is_everything=False)

    def _drop_first(self, bucket: Bucket, rule: Rule) -> None:
        """Drops state without a step counter where it turns out to be from the first step."""
        if rule.was_first is None or not bucket.key.tensors:
            return
        # An empty one has nothing to tell by, and nothing to lose.
        members = [member for member in bucket.members if member[0].numel()]
        answers = [rule.was_first(param, state, bucket.hyper) for param, state in members]
        # One wait for all of them.
        told = torch.stack(answers).tolist() if answers else []
        for (param, _), was_first in zip(members, told, strict=True):
            if was_first:
                del self.optimizer.state[param]

    def _restore_everything(self) -> list[Tensor]:
        """Puts back the groups that were copied whole; returns their parameters."""
        if self.record is None:
            return []
        restored: list[Tensor] = []
        for index, group in enumerate(self.optimizer.param_groups):
            if self._kept(index) is not None:
                continue
            for param in group["params"]:
                restore_param(param, self.record.copies[id(param)])
                restored.append(param)
                if id(param) in self.record.had_state:
                    state = self.optimizer.state[param]
                    restore_state(state, self.record.copies[id(param)], is_everything=True)
                else:
                    self.optimizer.state.pop(param, None)
        return restored

    def _cannot(self, reason: str, *, what_to_do: str = KEEP_SOME) -> CannotUndo:
        name = type(self.optimizer).__name__
        return CannotUndo(name, reason=reason, what_to_do=what_to_do)


def _lrs(
    optimizer: torch.optim.Optimizer, lr: float | Sequence[float] | None
) -> tuple[float | None, ...]:
    num_groups = len(optimizer.param_groups)
    lrs = tuple(lr) if isinstance(lr, Sequence) else (lr,) * num_groups
    if len(lrs) != num_groups:
        raise ConfigError("lr", list(lrs), f"give one rate, or one for each of {num_groups} groups")
    return lrs


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _set_scalars(members: list[Member], name: str, value: float) -> None:
    tensors = [state[name] for _, state in members if _is_tensor(state[name])]
    if tensors:
        torch._foreach_copy_(tensors, [torch.full_like(tensors[0], value)] * len(tensors))
    for _, state in members:
        if not _is_tensor(state[name]):
            state[name] = type(state[name])(value)


def _fill(tensor: Tensor, value: float) -> None:
    tensor.fill_(complex(value, value) if tensor.is_complex() else value)
