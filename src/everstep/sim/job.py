"""A training job as the simulator sees it: a shape, what things take, and what they weigh.

Knows no system and no failure. Everything per device of a worker, because that is where memory and
links are; a worker is one device, or a tensor-parallel group that lives and dies together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from everstep.core.errors import ConfigError
from everstep.schedule.documents import profile_from_json
from everstep.schedule.durations import Durations, StageDurations
from everstep.schedule.problem import Problem, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The smallest piece that can be moved between stages, on one device of a worker."""

    forward: float
    input_gradient: float
    weight_gradient: float
    state_bytes: float
    """Parameters, gradients and optimizer state."""

    gradient_bytes: float
    """What is reduced over the replicas."""

    activation_bytes: float
    """Of one micro-batch, held between F and W."""

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Bytes per second and device."""

    network: float = 25e9
    """Between nodes: 200 Gbit/s for each device, as in Megatron's cluster (arXiv 2104.04473)."""

    pinned_copy: float = 55.3e9
    """Device to pinned host memory, measured on one H200 machine."""

    disk: float = 2.1e9
    """Written with O_DIRECT and fsync, measured there too."""

    memory: float = 2.1e12
    """Device to device, measured there too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    name: str
    replicas: int
    stages: int
    microbatches: int
    """Per replica."""

    layers: tuple[Layer, ...]
    boundary_bytes: float
    """Of one micro-batch, between two stages."""

    samples_per_microbatch: int = 1
    devices_per_worker: int = 1
    device_bytes: float = 80e9
    links: Links = Links()
    optimizer_s: float | None = None
    """Measured; otherwise from the bytes of the state and the speed of memory."""

    measured: Durations | None = None
    """Of the stages, where a live job has measured them; else summed up from the layers."""

    limits: tuple[int | None, ...] | None = None
    """Micro-batches in flight, where known; else from memory."""

    def __post_init__(self) -> None:
        for field in ("replicas", "stages", "microbatches", "devices_per_worker"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "must be at least 1")
        if self.stages > len(self.layers):
            rule = f"the model has {len(self.layers)} layers, and a stage needs one"
            raise ConfigError("stages", self.stages, rule)

    @property
    def num_workers(self) -> int:
        return self.replicas * self.stages

    @property
    def batch_microbatches(self) -> int:
        return self.replicas * self.microbatches

    @property
    def samples_per_step(self) -> int:
        return self.batch_microbatches * self.samples_per_microbatch

    @property
    def state_bytes(self) -> float:
        """Of the whole model, over all devices of one replica's workers."""
        return sum(layer.state_bytes for layer in self.layers) * self.devices_per_worker

    def slices(self) -> list[Sequence[Layer]]:
        """The layers of each stage."""
        return split_evenly(self.layers, self.stages)

    def stage_state_bytes(self) -> list[float]:
        return [sum(layer.state_bytes for layer in layers) for layers in self.slices()]

    def durations(self) -> Durations:
        """Per stage, in seconds. Nobody needs the gradient of the first stage's input, but the
        layers inside it do need theirs: that time is paid with W."""
        if self.measured is not None:
            return self.measured
        stages = []
        for number, layers in enumerate(self.slices()):
            gradient = sum(layer.input_gradient for layer in layers)
            weight = sum(layer.weight_gradient for layer in layers)
            stages.append(
                StageDurations(
                    forward=sum(layer.forward for layer in layers),
                    input_gradient=gradient if number else 0.0,
                    weight_gradient=weight if number else gradient + weight,
                )
            )
        widest = max(sum(layer.gradient_bytes for layer in layers) for layers in self.slices())
        return Durations(
            stages=tuple(stages),
            transfer=self.boundary_bytes / self.links.network,
            reduction=all_reduce_s(widest, self.replicas, self.links),
            optimizer=self.update_s(max(self.stage_state_bytes())),
        )

    def update_s(self, state_bytes: float) -> float:
        """Reads and writes the state once."""
        if self.optimizer_s is not None:
            return self.optimizer_s
        return 2 * state_bytes / self.links.memory

    def in_flight(self) -> tuple[int | None, ...] | None:
        """Per stage, what memory holds beside the state. At least 1: fitting is asked elsewhere."""
        if self.limits is not None:
            return self.limits
        return tuple(max(1, in_flight_in(layers, self.device_bytes)) for layers in self.slices())

    def problem(self, variant: Variant = Variant.DECOUPLED_STAGGERED) -> Problem:
        return Problem(
            replicas=self.replicas,
            stages=self.stages,
            microbatches=self.microbatches,
            durations=self.durations(),
            in_flight=self.in_flight(),
            variant=variant,
        )


def all_reduce_s(gradient_bytes: float, num_members: int, links: Links) -> float:
    """A ring moves 2 (n-1)/n of the bytes through each link."""
    return 2 * (num_members - 1) / num_members * gradient_bytes / links.network


def in_flight_in(layers: Sequence[Layer], device_bytes: float) -> int:
    """How many micro-batches fit beside the state of these layers; negative when not even that."""
    free = device_bytes - sum(layer.state_bytes for layer in layers)
    per_microbatch = sum(layer.activation_bytes for layer in layers)
    return int(free // per_microbatch) if per_microbatch else 1 << 20


@lru_cache(maxsize=1024)
def split_evenly(layers: tuple[Layer, ...], num_stages: int) -> list[Sequence[Layer]]:
    """Contiguous slices with the lightest heaviest slice."""
    ends = cuts([layer.total for layer in layers], num_stages)
    return [layers[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def cuts(costs: Sequence[float], num_slices: int) -> list[int]:
    """Where to cut a row of costs so that the heaviest slice is lightest; all slices get something.

    A slice limit is tried by filling slices from the end, so that what is left over makes the first
    ones light; the smallest limit that works is one of the sums of consecutive costs.
    """
    sums = [0.0, *accumulate(costs)]
    candidates = sorted({end - start for i, start in enumerate(sums) for end in sums[i + 1 :]})
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if len(_fill(costs, candidates[middle] * (1 + 1e-12), num_slices)) <= num_slices:
            high = middle
        else:
            low = middle + 1
    return _fill(costs, candidates[low] * (1 + 1e-12), num_slices)


def _fill(costs: Sequence[float], limit: float, num_slices: int) -> list[int]:
    """Ends of the slices, filled from the end, leaving one cost at least for each earlier slice."""
    ends, load = [len(costs)], 0.0
    for index in range(len(costs) - 1, -1, -1):
        must_cut = index + 1 < num_slices - len(ends) + 1
        if (load + costs[index] > limit and load > 0) or must_cut:
            ends.append(index + 1)
            load = 0.0
        load += costs[index]
    return ends[::-1]


def job_from_profile(
    path: Path,
    *,
    replicas: int,
    microbatches: int,
    state_bytes: float,
    layers_per_stage: int = 4,
    device_bytes: float = 80e9,
) -> Job:
    """From durations that a live job measured (`everstep plan --profile` reads the same file).

    A profile does not say how its stages divide: each is taken as `layers_per_stage` equal layers.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--profile", path, str(error)) from None
    durations, limits = profile_from_json(text)
    layers = [
        Layer(
            forward=stage.forward / layers_per_stage,
            input_gradient=stage.input_gradient / layers_per_stage,
            weight_gradient=stage.weight_gradient / layers_per_stage,
            state_bytes=state_bytes / layers_per_stage,
            gradient_bytes=state_bytes / layers_per_stage / 8,
            activation_bytes=0.0,
        )
        for stage in durations.stages
        for _ in range(layers_per_stage)
    ]
    return Job(
        name=path.stem,
        replicas=replicas,
        stages=len(durations.stages),
        microbatches=microbatches,
        layers=tuple(layers),
        boundary_bytes=0.0,
        device_bytes=device_bytes,
        optimizer_s=durations.optimizer,
        measured=durations,
        limits=limits,
    )
