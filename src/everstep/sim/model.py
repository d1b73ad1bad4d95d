"""From a transformer's description to layers: operations over speed, parameters times bytes.

Counts per layer and micro-batch of b sequences of s tokens, hidden size h (the counts are those of
Narayanan et al., arXiv 2104.04473; activations those of Korthikanti et al., arXiv 2205.05198):

    matrices    24 b s h^2 operations in F, as many in B, as many in W; 12 h^2 + 13 h parameters
    attention    4 b s^2 h operations in F, twice as many in B, none in W
    head         2 b s h V operations in F, B and W each; V h parameters, as the embedding has
    activations 34 b s h bytes, with attention recomputed inside its kernel

Tensor parallelism divides all of them by its degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from everstep.core.errors import ConfigError
from everstep.sim.job import Job, Layer, Links

STATE_BYTES_PER_PARAMETER = 16
"""Adam in mixed precision: 2 weights, 2 gradients, 4 master weights, 4 + 4 moments."""

GRADIENT_BYTES_PER_PARAMETER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    flops: float
    """Peak, dense, 16 bit."""

    efficiency: float
    bytes: float

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ConfigError("--efficiency", self.efficiency, "must be above 0 and at most 1")
        for field in ("flops", "bytes"):
            if getattr(self, field) <= 0:
                raise ConfigError(f"device.{field}", getattr(self, field), "must be positive")


A100 = Device(flops=312e12, efficiency=0.45, bytes=80e9)
"""Peak from the data sheet; 44 to 52 % of it is what Megatron reports (arXiv 2104.04473)."""

H100 = Device(flops=989e12, efficiency=0.40, bytes=80e9)
H200 = Device(flops=989e12, efficiency=0.40, bytes=141e9)
DEVICES = {"a100": A100, "h100": H100, "h200": H200}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    layers: int
    hidden: int
    sequence: int = 2048
    vocabulary: int = 51_200
    """Of all of Megatron's published shapes."""

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "sequence", "vocabulary"):
            if getattr(self, field) < 1:
                raise ConfigError(f"model.{field}", getattr(self, field), "must be at least 1")

    @property
    def parameters(self) -> float:
        embedding = (self.vocabulary + self.sequence) * self.hidden
        return self.layers * (12 * self.hidden**2 + 13 * self.hidden) + embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model with the shape it is usually trained in."""

    model: Transformer
    tensor_parallel: int
    stages: int
    batch: int
    """Samples per step."""


PRESETS: dict[str, Preset] = {
    # Sizes of Brown et al. (arXiv 2005.14165, table 2.1); the shapes are ours, for 32 devices.
    "gpt-350m": Preset(
        model=Transformer(layers=24, hidden=1024), tensor_parallel=1, stages=2, batch=512
    ),
    "gpt-1.3b": Preset(
        model=Transformer(layers=24, hidden=2048), tensor_parallel=1, stages=4, batch=512
    ),
    "gpt-2.7b": Preset(
        model=Transformer(layers=32, hidden=2560), tensor_parallel=1, stages=4, batch=512
    ),
    "gpt-6.7b": Preset(
        model=Transformer(layers=32, hidden=4096), tensor_parallel=1, stages=8, batch=512
    ),
    # Narayanan et al. (arXiv 2104.04473, table 1): layers, hidden size, t, p and batch.
    "gpt-18.4b": Preset(
        model=Transformer(layers=40, hidden=6144), tensor_parallel=8, stages=1, batch=1024
    ),
    "gpt-39b": Preset(
        model=Transformer(layers=48, hidden=8192), tensor_parallel=8, stages=2, batch=1536
    ),
    "gpt-145.6b": Preset(
        model=Transformer(layers=80, hidden=12288), tensor_parallel=8, stages=8, batch=2304
    ),
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(PRESETS)}"
        raise ConfigError("--preset", name, hint)
    return PRESETS[name]


def describe(
    model: Transformer,
    *,
    name: str,
    replicas: int,
    stages: int,
    microbatches: int,
    microbatch_size: int = 1,
    tensor_parallel: int = 1,
    device: Device = A100,
    links: Links | None = None,
) -> Job:
    """The job of training `model` in this shape on these devices."""
    per_second = device.flops * device.efficiency * tensor_parallel
    tokens = microbatch_size * model.sequence
    matrices = 24 * tokens * model.hidden**2 / per_second
    attention = 4 * tokens * model.sequence * model.hidden / per_second
    head = 2 * tokens * model.hidden * model.vocabulary / per_second
    middle = _layer(
        matrices + attention,
        matrices + 2 * attention,
        matrices,
        parameters=(12 * model.hidden**2 + 13 * model.hidden) / tensor_parallel,
        activations=34 * tokens * model.hidden / tensor_parallel,
    )
    vocabulary = model.vocabulary * model.hidden / tensor_parallel
    embedding = _layer(
        0.0,
        0.0,
        0.0,
        parameters=vocabulary,
        activations=2 * tokens * model.hidden / tensor_parallel,
    )
    logits = _layer(
        head,
        head,
        head,
        parameters=vocabulary,
        activations=4 * tokens * model.vocabulary / tensor_parallel,
    )
    # The embedding and the head belong to the first and the last layer: they cannot be cut off.
    layers = [middle] * model.layers
    layers[0] = _join(embedding, layers[0])
    layers[-1] = _join(layers[-1], logits)
    return Job(
        name=name,
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        layers=tuple(layers),
        boundary_bytes=2 * tokens * model.hidden / tensor_parallel,
        samples_per_microbatch=microbatch_size,
        devices_per_worker=tensor_parallel,
        device_bytes=device.bytes,
        links=links or Links(),
    )


def _layer(
    forward: float,
    input_gradient: float,
    weight_gradient: float,
    *,
    parameters: float,
    activations: float,
) -> Layer:
    return Layer(
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        state_bytes=parameters * STATE_BYTES_PER_PARAMETER,
        gradient_bytes=parameters * GRADIENT_BYTES_PER_PARAMETER,
        activation_bytes=activations,
    )


def _join(one: Layer, other: Layer) -> Layer:
    return Layer(
        forward=one.forward + other.forward,
        input_gradient=one.input_gradient + other.input_gradient,
        weight_gradient=one.weight_gradient + other.weight_gradient,
        state_bytes=one.state_bytes + other.state_bytes,
        gradient_bytes=one.gradient_bytes + other.gradient_bytes,
        activation_bytes=one.activation_bytes + other.activation_bytes,
    )
