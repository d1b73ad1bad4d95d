"""`everstep simulate`: a cluster over weeks, systems side by side under a trace."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.cli import simulate_more
from everstep.cli.durations import seconds, seconds_or_none
from everstep.core.errors import ConfigError

if TYPE_CHECKING:
    from everstep.sim.scenario import Scenario


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


def add_to(app: typer.Typer) -> None:
    group = typer.Typer(rich_markup_mode=None, invoke_without_command=True, no_args_is_help=True)
    group.callback()(simulate_command)
    simulate_more.add_to(group)
    app.add_typer(group, name="simulate")


def simulate_command(
    ctx: typer.Context,
    replicas: Annotated[int, typer.Option(help="Copies of the model.")] = 4,
    stages: Annotated[int | None, typer.Option(help="Slices of the model.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Per replica and step; from the preset's batch if not given.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="A model: gpt-350m ... gpt-145.6b.")] = None,
    layers: Annotated[int | None, typer.Option(help="Of a model of your own.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Its hidden size.")] = None,
    sequence: Annotated[int, typer.Option(help="Tokens of a sample.")] = 2048,
    profile: Annotated[
        Path | None, typer.Option(help="Durations measured by a live job, as JSON.")
    ] = None,
    state_gb: Annotated[float, typer.Option(help="Of a profile's stage.")] = 1.0,
    microbatch_size: Annotated[int, typer.Option(help="Samples.")] = 1,
    tensor_parallel: Annotated[int | None, typer.Option(help="Devices per worker.")] = None,
    device: Annotated[str, typer.Option(help="a100, h100 or h200.")] = "a100",
    efficiency: Annotated[float | None, typer.Option(help="Of its peak.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Of a device.")] = None,
    network_gb_s: Annotated[float, typer.Option(help="Per device, GB/s.")] = 25.0,
    workers_per_node: Annotated[int, typer.Option(help="Lost together.")] = 1,
    nodes: Annotated[int | None, typer.Option(help="More than the job needs wait.")] = None,
    trace: Annotated[Path | None, typer.Option(help="A trace file, in any known format.")] = None,
    servers: Annotated[
        int | None, typer.Option(help="In the trace's cluster, if it names only those that failed.")
    ] = None,
    every: Annotated[
        str | None, typer.Option(metavar="TIME", help="One node is lost every so often, for good.")
    ] = None,
    kind: Annotated[
        str, typer.Option(help="exponential, weibull, racks or spot; with --mtbf.")
    ] = "exponential",
    mtbf: Annotated[str | None, typer.Option(metavar="TIME", help="Of one node.")] = None,
    repair: Annotated[str, typer.Option(metavar="TIME", help="On average.")] = "4h",
    duration: Annotated[
        str | None, typer.Option(metavar="TIME", help="Default: the trace's, or one day.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
    runs: Annotated[int, typer.Option(help="Generated traces, for confidence intervals.")] = 1,
    policy: Annotated[
        str | None,
        typer.Option(
            help="When to save: lost-progress, young-daly, checkfreq or a number of steps; by"
            " default each system's own."
        ),
    ] = None,
    spares: Annotated[
        int | None, typer.Option(help="Nodes that stand by; default one replica's worth.")
    ] = None,
    logging: Annotated[
        int,
        typer.Option(
            metavar="GROUPS",
            help="everstep logs what crosses the boundaries of so many groups of stages, and"
            " replays a stage without a live worker.",
        ),
    ] = 0,
    price: Annotated[float | None, typer.Option(help="Of a device hour.")] = None,
    system: Annotated[
        list[str] | None, typer.Option(help="Only these systems; may be repeated.")
    ] = None,
    constants: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a constant.")
    ] = None,
    output_format: Annotated[
        Format, typer.Option("--format", help="What to print.")
    ] = Format.TABLE,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report there.")] = None,
) -> None:
    """A job over a failure trace, systems side by side."""
    if ctx.invoked_subcommand is not None:
        return
    from everstep.sim.scenario import JobChoice, Scenario, TraceChoice

    scenario = Scenario(
        job=JobChoice(
            replicas=replicas,
            stages=stages,
            microbatches=microbatches,
            preset=preset,
            layers=layers,
            hidden=hidden,
            sequence=sequence,
            profile=profile,
            state_bytes=state_gb * 1e9,
            microbatch_size=microbatch_size,
            tensor_parallel=tensor_parallel,
            device=device,
            efficiency=efficiency,
            memory_bytes=None if memory_gb is None else memory_gb * 1e9,
            network=network_gb_s * 1e9,
        ),
        failures=TraceChoice(
            path=trace,
            servers=servers,
            every_s=seconds_or_none(every, field="--every"),
            kind=kind,
            mtbf_s=seconds_or_none(mtbf, field="--mtbf"),
            repair_s=seconds(repair, field="--repair"),
            duration_s=seconds_or_none(duration, field="--duration"),
        ),
        workers_per_node=workers_per_node,
        nodes=nodes,
        seed=seed,
        policy=policy,
        spares=spares,
        log_groups=logging,
        price=price,
        systems=system,
        constants=constants or [],
    )
    if runs < 1:
        raise ConfigError("--runs", runs, "must be at least 1")
    if runs > 1:
        _run_many(scenario, runs, output_format)
    else:
        _run_once(scenario, output_format, report)


def _run_once(scenario: Scenario, output_format: Format, report: Path | None) -> None:
    from everstep.cli.print_simulation import print_outcomes, progress
    from everstep.sim.reports import to_json
    from everstep.sim.results import simulate

    trace = scenario.trace()
    setting = scenario.setting(trace)
    names = scenario.chosen()
    with progress(len(names)) as tick:
        outcomes = simulate(
            trace, setting, systems=names, price_per_device_hour=scenario.price, on_done=tick
        )
    if report is not None:
        from everstep.sim.html import render

        _write(report, render(outcomes, trace, setting))
    if output_format is Format.JSON:
        print(json.dumps(to_json(outcomes, trace, setting)))
    else:
        print_outcomes(outcomes, trace, setting)


def _run_many(scenario: Scenario, runs: int, output_format: Format) -> None:
    from everstep.cli.print_simulation import print_confidence, progress
    from everstep.sim.confidence import over_seeds
    from everstep.sim.results import Outcome, simulate

    if not scenario.failures.is_drawn:
        raise ConfigError("--runs", runs, "a trace file has one history; use --mtbf or --every")
    names = scenario.chosen()
    with progress(runs * len(names)) as tick:

        def one(seed: int) -> list[Outcome]:
            trace = scenario.trace(seed=seed)
            return simulate(trace, scenario.setting(trace), systems=names, on_done=tick)

        found = over_seeds(one, first_seed=scenario.seed, runs=runs)
    if output_format is Format.JSON:
        print(json.dumps({"format": 1, "runs": runs, "systems": [asdict(row) for row in found]}))
    else:
        print_confidence(found, runs)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--report", path, error.strerror or str(error)) from None
