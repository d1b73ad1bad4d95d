"""Planning questions: which layout is soonest, which is cheapest, what is one more node worth.

Every layout trains the same batch on the same nodes under the same failures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from everstep.core.errors import ConfigError
from everstep.sim.confidence import Interval, interval
from everstep.sim.model import Device, Transformer, describe
from everstep.sim.results import simulate
from everstep.sim.saving import policy_named
from everstep.sim.setting import Failures, Setting
from everstep.sim.trace import HOUR_S, Trace

SWEEP_PLAN_BUDGET = 6_000
"""Less than for one simulation: a sweep compares, and there are many of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    replicas: int
    stages: int
    microbatches: int
    microbatch_size: int
    policy: str

    def __str__(self) -> str:
        return f"{self.replicas} x {self.stages} x {self.microbatches}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    layout: Layout
    does_not_fit: str | None
    throughput: Interval
    """Samples per second, over the traces."""

    useful_fraction: float
    device_hours: float
    """Of a trace, on average."""

    duration_s: float

    def hours_for(self, samples: float) -> float:
        return samples / self.throughput.mean / HOUR_S if self.throughput.mean else float("inf")

    def money_for(self, samples: float, price_per_device_hour: float) -> float:
        """What is paid is what is up: lost nodes cost nothing while they are away."""
        per_hour = self.device_hours / (self.duration_s / HOUR_S) * price_per_device_hour
        return self.hours_for(samples) * per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is held fixed while layouts vary."""

    model: Transformer
    name: str
    batch: int
    num_nodes: int
    workers_per_node: int
    device: Device
    tensor_parallel: int
    system: str
    traces: Callable[[int, int], Trace]
    """Of so many nodes, from a seed."""

    seeds: Sequence[int]


def layouts(
    question: Question,
    *,
    stages: Sequence[int],
    microbatch_sizes: Sequence[int],
    policies: Sequence[str],
) -> list[Layout]:
    """All that leave no more workers idle than a replica has, and divide the batch."""
    num_workers = question.num_nodes * question.workers_per_node
    found = []
    for num_stages, size, policy in product(stages, microbatch_sizes, policies):
        replicas = num_workers // num_stages
        microbatches = question.batch // max(1, replicas * size)
        if replicas and microbatches and num_stages <= question.model.layers:
            layout = Layout(
                replicas=replicas,
                stages=num_stages,
                microbatches=microbatches,
                microbatch_size=size,
                policy=policy,
            )
            found.append(layout)
    if not found:
        rule = f"no layout fits {num_workers} workers, {question.model.layers} layers, this batch"
        raise ConfigError("the sweep", "empty", rule)
    return found


def sweep(
    question: Question, choices: Sequence[Layout], *, on_done: Callable[[], None] | None = None
) -> list[Row]:
    """The fastest first; those that do not fit last."""
    rows = []
    for layout in choices:
        rows.append(try_layout(question, layout))
        if on_done is not None:
            on_done()
    return sorted(rows, key=lambda row: -row.throughput.mean)


def try_layout(question: Question, layout: Layout) -> Row:
    job = describe(
        question.model,
        name=question.name,
        replicas=layout.replicas,
        stages=layout.stages,
        microbatches=layout.microbatches,
        microbatch_size=layout.microbatch_size,
        tensor_parallel=question.tensor_parallel,
        device=question.device,
    )
    outcomes, duration_s = [], 0.0
    for seed in question.seeds:
        trace = question.traces(question.num_nodes, seed)
        duration_s = trace.duration_s
        setting = Setting(
            job=job,
            failures=Failures.of(trace),
            workers_per_node=question.workers_per_node,
            num_nodes=question.num_nodes,
            policy=policy_named(layout.policy),
            plan_budget=SWEEP_PLAN_BUDGET,
        )
        outcomes += simulate(trace, setting, systems=[question.system])
    number = len(outcomes)
    return Row(
        layout=layout,
        does_not_fit=outcomes[0].does_not_fit,
        throughput=interval([outcome.throughput for outcome in outcomes]),
        useful_fraction=sum(outcome.useful_fraction for outcome in outcomes) / number,
        device_hours=sum(outcome.device_hours for outcome in outcomes) / number,
        duration_s=duration_s,
    )
