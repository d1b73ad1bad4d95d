"""`everstep simulate sweep, validate, grid`: questions that take more than one simulation."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.durations import seconds
from everstep.core.errors import ConfigError


def add_to(group: typer.Typer) -> None:
    group.command("sweep")(sweep_command)
    group.command("validate")(validate_command)
    group.command("grid")(grid_command)


def _numbers(text: str, *, field: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(field, text, "must be whole numbers such as 4,8,16")
    return numbers


def sweep_command(
    preset: Annotated[str, typer.Option(help="A model: gpt-350m ... gpt-145.6b.")],
    nodes: Annotated[int, typer.Option(help="That there are.")],
    mtbf: Annotated[str, typer.Option(metavar="TIME", help="Of one node.")],
    stages: Annotated[str, typer.Option(metavar="N,N", help="To try.")] = "1,2,4,8,16",
    microbatch_size: Annotated[str, typer.Option(metavar="N,N", help="To try.")] = "1,2,4",
    policy: Annotated[str, typer.Option(metavar="NAME,NAME", help="To try.")] = "lost-progress",
    batch: Annotated[int | None, typer.Option(help="Samples per step.")] = None,
    samples: Annotated[float, typer.Option(help="To train on, in millions.")] = 1.0,
    workers_per_node: Annotated[int, typer.Option(help="Lost together.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(help="Devices per worker.")] = 1,
    device: Annotated[str, typer.Option(help="a100, h100 or h200.")] = "a100",
    kind: Annotated[str, typer.Option(help="exponential, weibull, racks or spot.")] = "exponential",
    repair: Annotated[str, typer.Option(metavar="TIME", help="On average.")] = "4h",
    duration: Annotated[str, typer.Option(metavar="TIME", help="Of each trace.")] = "10d",
    runs: Annotated[int, typer.Option(help="Traces per layout.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the first trace.")] = 0,
    system: Annotated[str, typer.Option(help="That trains.")] = "everstep",
    price: Annotated[float, typer.Option(help="Of a device hour.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Which layout finishes soonest, which is cheapest, what one more node is worth."""
    from everstep.cli.print_simulation import progress
    from everstep.cli.print_sweep import print_sweep
    from everstep.sim.model import DEVICES
    from everstep.sim.model import preset as preset_named
    from everstep.sim.scenario import TraceChoice
    from everstep.sim.sweep import Layout, Question, layouts, sweep
    from everstep.sim.systems.registry import chosen

    if runs < 1:
        raise ConfigError("--runs", runs, "must be at least 1")
    if device not in DEVICES:
        raise ConfigError("--device", device, f"known are {', '.join(DEVICES)}")
    found = preset_named(preset)
    failures = TraceChoice(
        kind=kind,
        mtbf_s=seconds(mtbf, field="--mtbf"),
        repair_s=seconds(repair, field="--repair"),
        duration_s=seconds(duration, field="--duration"),
    )

    def question(num_nodes: int) -> Question:
        return Question(
            model=found.model,
            name=preset,
            batch=batch or found.batch,
            num_nodes=num_nodes,
            workers_per_node=workers_per_node,
            device=DEVICES[device],
            tensor_parallel=tensor_parallel,
            system=chosen([system])[0],
            traces=lambda number, trace_seed: failures.trace(number, seed=trace_seed),
            seeds=range(seed, seed + runs),
        )

    def choices(num_nodes: int) -> list[Layout]:
        return layouts(
            question(num_nodes),
            stages=_numbers(stages, field="--stages"),
            microbatch_sizes=_numbers(microbatch_size, field="--microbatch-size"),
            policies=policy.split(","),
        )

    now, wider = choices(nodes), choices(nodes + 1)
    with progress(len(now) + len(wider)) as tick:
        rows = sweep(question(nodes), now, on_done=tick)
        more = sweep(question(nodes + 1), wider, on_done=tick)[0]
    if as_json:
        document = {"format": 1, "rows": [asdict(row) for row in rows], "one_more": asdict(more)}
        print(json.dumps(document))
    else:
        print_sweep(rows, more, num_nodes=nodes, samples=samples * 1e6, price=price)


def validate_command(
    events: Annotated[Path, typer.Argument(metavar="EVENTS", help="Of `everstep run --events`.")],
    in_flight: Annotated[int | None, typer.Option(help="The job's limit, if it has one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replays a live run's losses: predicted against measured time. Status 1 above 5 %."""
    from everstep.cli.print_sweep import print_validation
    from everstep.sim.live_run import live_run, read_events
    from everstep.sim.validate import validate

    found = validate(live_run(read_events(events), name=events.name), in_flight=in_flight)
    if as_json:
        print(json.dumps({"format": 1, **asdict(found), "error_fraction": found.error_fraction}))
    else:
        print_validation(found)
    if not found.is_within_bar:
        raise typer.Exit(1)


def grid_command(
    gcp: Annotated[Path | None, typer.Option(help="The GCP A100 trace file.")] = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
) -> None:
    """The settings of ReCycle's evaluation: everstep's ratio to Oobleck and Bamboo in each."""
    from everstep.cli.print_sweep import print_cell, print_grid_head, print_spreads
    from everstep.sim.evaluation import evaluate

    print_grid_head()
    print_spreads(evaluate(gcp, seed=seed, on_cell=print_cell))
