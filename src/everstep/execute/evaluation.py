"""Evaluation: a data set goes forward through the same pipelines, and its loss comes back.

Every worker runs the F actions of its plan, round after round, on slices of the data set; the sums
are then added up over all workers, so everybody knows the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from everstep.core.errors import ConfigError
from everstep.execute.boundary import flatten
from everstep.execute.data import Dataset, fetch
from everstep.execute.executor import RECEIVE_WITHIN_S
from everstep.execute.links import DIRECTIONS, Links
from everstep.execute.reduction import sum_over
from everstep.execute.stage import Stage, data_parts
from everstep.schedule.actions import Action, Kind


class Evaluation:
    def __init__(
        self,
        stage: Stage,
        links: Links,
        *,
        microbatch_size: int,
        replicas: int,
        microbatches: int,
        metrics: Sequence[str],
    ) -> None:
        self._stage = stage
        self._links = links
        self._size = microbatch_size
        self._microbatches = microbatches
        self._num_slices = replicas * microbatches
        self._names = ("loss", *metrics)

    def run(self, dataset: Dataset, actions: Sequence[Action]) -> dict[str, float]:
        """Means over the data set: the loss and every metric."""
        self._check(dataset)
        sums = [0.0] * (1 + len(self._names))
        num_rounds = -(-len(dataset) // (self._size * self._num_slices))
        for number in range(num_rounds):
            for action in actions:
                if action.kind is Kind.FORWARD:
                    self._forward(dataset, number, action, sums)
        num_samples, *totals = sum_over(self._links.world, sums)
        return {name: total / num_samples for name, total in zip(self._names, totals, strict=True)}

    def _check(self, dataset: Dataset) -> None:
        if len(dataset) == 0:
            raise ConfigError("dataset", "empty", "there is nothing to evaluate")
        # A traced piece of a model takes one shape only.
        is_traced = self._stage.num_stages > 1 and self._stage.module.takes_arguments
        if is_traced and len(dataset) % self._size:
            raise ConfigError(
                "dataset",
                f"{len(dataset)} samples long",
                f"a model cut by split= can only be evaluated on a multiple of {self._size}"
                " samples, its micro-batch",
            )

    def _forward(self, dataset: Dataset, number: int, action: Action, sums: list[float]) -> None:
        place = number * self._num_slices + action.replica * self._microbatches + action.microbatch
        samples = range(place * self._size, min((place + 1) * self._size, len(dataset)))
        if not samples:
            return
        key = f"evaluate {place}"
        stage, channels = self._stage, self._links.channels
        parts = data_parts(stage)
        given, target = fetch(dataset, samples, parts=parts) if parts else (None, None)
        if action.receives_from is None:
            inputs, structure = flatten(given)
        else:
            assert channels is not None
            direction = DIRECTIONS[Kind.FORWARD]
            message = channels.receive(
                action.receives_from, direction, key, timeout_s=RECEIVE_WITHIN_S
            )
            inputs, structure = list(message.tensors), message.structure
        found = stage.evaluate(inputs, structure, target)
        if action.sends_to is not None:
            assert channels is not None
            direction = DIRECTIONS[Kind.FORWARD]
            channels.send(action.sends_to, direction, key, found.tensors, found.structure)
        if found.result is not None:
            values = (1.0, found.result.loss, *found.result.metrics.values())
            for position, value in enumerate(values):
                sums[position] += value * len(samples)
