"""From what a user chose to a job, a trace and a setting. Says what is missing in one sentence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from everstep.core.errors import ConfigError
from everstep.sim.constants import Constants, with_overrides
from everstep.sim.generate import Kind, Rates, generate, monotone
from everstep.sim.job import Job, Links, job_from_profile
from everstep.sim.model import DEVICES, Device, Transformer, describe, preset
from everstep.sim.read_trace import read_trace
from everstep.sim.saving import policy_named
from everstep.sim.setting import Failures, Setting
from everstep.sim.systems.registry import chosen
from everstep.sim.trace import DAY_S, Trace, cut, fit


@dataclass(frozen=True, slots=True, kw_only=True)
class JobChoice:
    replicas: int
    stages: int | None = None
    microbatches: int | None = None
    preset: str | None = None
    layers: int | None = None
    hidden: int | None = None
    sequence: int = 2048
    profile: Path | None = None
    state_bytes: float = 1e9
    microbatch_size: int = 1
    tensor_parallel: int | None = None
    device: str = "a100"
    efficiency: float | None = None
    memory_bytes: float | None = None
    network: float = 25e9

    def job(self) -> Job:
        """From a preset, a profile or a description: exactly one of them."""
        named = [self.preset, self.profile, self.layers]
        if sum(choice is not None for choice in named) != 1:
            raise ConfigError(
                "the model",
                "not clear",
                "give one of --preset, --profile, or --layers and --hidden",
            )
        if self.profile is not None:
            return self._measured(self.profile)
        if self.preset is not None:
            found = preset(self.preset)
            return self._described(
                found.model,
                name=self.preset,
                stages=self.stages or found.stages,
                tensor_parallel=self.tensor_parallel or found.tensor_parallel,
                batch=found.batch,
            )
        if self.layers is None or self.hidden is None:
            raise ConfigError("--hidden", self.hidden, "a model needs --layers and --hidden")
        model = Transformer(layers=self.layers, hidden=self.hidden, sequence=self.sequence)
        return self._described(
            model,
            name=f"{model.parameters / 1e9:.1f}B",
            stages=self.stages or 1,
            tensor_parallel=self.tensor_parallel or 1,
            batch=None,
        )

    def _described(
        self, model: Transformer, *, name: str, stages: int, tensor_parallel: int, batch: int | None
    ) -> Job:
        return describe(
            model,
            name=name,
            replicas=self.replicas,
            stages=stages,
            microbatches=self._microbatches(batch),
            microbatch_size=self.microbatch_size,
            tensor_parallel=tensor_parallel,
            device=self._device(),
            links=Links(network=self.network),
        )

    def _measured(self, profile: Path) -> Job:
        job = job_from_profile(
            profile,
            replicas=self.replicas,
            microbatches=self._microbatches(None),
            state_bytes=self.state_bytes,
            device_bytes=self._device().bytes,
        )
        if self.stages not in (None, job.stages):
            raise ConfigError("--stages", self.stages, f"the profile has {job.stages}")
        return job

    def _microbatches(self, batch: int | None) -> int:
        if self.microbatches is not None:
            return self.microbatches
        if batch is None:
            raise ConfigError(
                "--microbatches", "not given", "only presets have a batch of their own"
            )
        return max(1, batch // (self.replicas * self.microbatch_size))

    def _device(self) -> Device:
        if self.device not in DEVICES:
            raise ConfigError("--device", self.device, f"known are {', '.join(DEVICES)}")
        device = DEVICES[self.device]
        return replace(
            device,
            efficiency=self.efficiency or device.efficiency,
            bytes=self.memory_bytes or device.bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    path: Path | None = None
    servers: int | None = None
    every_s: float | None = None
    kind: str = Kind.EXPONENTIAL
    mtbf_s: float | None = None
    repair_s: float = 4 * 3600.0
    duration_s: float | None = None

    def trace(self, num_nodes: int, *, seed: int) -> Trace:
        given = [self.path, self.every_s, self.mtbf_s]
        if sum(choice is not None for choice in given) != 1:
            raise ConfigError("the failures", "not clear", "give one of --trace, --every, --mtbf")
        if self.path is not None:
            found = read_trace(self.path, num_servers=self.servers, seed=seed)
            fitted = fit(found, num_nodes, seed=seed)
            return fitted if self.duration_s is None else cut(fitted, self.duration_s)
        duration_s = self.duration_s or DAY_S
        if self.every_s is not None:
            return monotone(
                every_s=self.every_s, num_nodes=num_nodes, duration_s=duration_s, seed=seed
            )
        if self.kind not in list(Kind):
            raise ConfigError("--kind", self.kind, f"known are {', '.join(Kind)}")
        rates = Rates(mtbf_s=self.mtbf_s or 0.0, repair_s=self.repair_s)
        kind = Kind(self.kind)
        return generate(kind, rates, num_nodes=num_nodes, duration_s=duration_s, seed=seed)

    @property
    def is_drawn(self) -> bool:
        """Whether another seed gives another trace in full."""
        return self.path is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    job: JobChoice
    failures: TraceChoice
    workers_per_node: int = 1
    nodes: int | None = None
    seed: int = 0
    policy: str | None = None
    spares: int | None = None
    log_groups: int = 0
    price: float | None = None
    systems: list[str] | None = None
    constants: list[str] = field(default_factory=list)

    def chosen(self) -> list[str]:
        return chosen(self.systems)

    def trace(self, *, seed: int | None = None) -> Trace:
        num_workers = self.job.job().num_workers
        num_nodes = self.nodes or -(-num_workers // max(1, self.workers_per_node))
        return self.failures.trace(num_nodes, seed=self.seed if seed is None else seed)

    def setting(self, trace: Trace) -> Setting:
        return Setting(
            job=self.job.job(),
            failures=Failures.of(trace),
            workers_per_node=self.workers_per_node,
            num_nodes=self.nodes,
            constants=with_overrides(Constants(), self.constants),
            policy=None if self.policy is None else policy_named(self.policy),
            num_spares=self.spares,
            log_groups=self.log_groups,
        )
