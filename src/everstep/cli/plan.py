"""`everstep plan`: the schedule of a step with its period, bound and baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from everstep.cli.plan_logging import LoggingFlags, find_tradeoff
from everstep.cli.print_logging import tradeoff_text
from everstep.cli.print_plan import Format, plan_text, print_grid
from everstep.core.errors import ConfigError
from everstep.core.ids import WorkerId
from everstep.schedule.documents import profile_from_json
from everstep.schedule.durations import Durations
from everstep.schedule.planner import Effort, plan
from everstep.schedule.problem import Problem, Variant

IMPROVE_S = 1.0
"""What a person waits for without noticing; the live system asks with less."""


def add_to(app: typer.Typer) -> None:
    app.command("plan")(plan_command)


def plan_command(
    replicas: Annotated[int, typer.Option(help="Copies of the model.")],
    stages: Annotated[int, typer.Option(help="Slices of the model, one worker each.")],
    microbatches: Annotated[int, typer.Option(help="Micro-batches per replica and step.")],
    lost: Annotated[
        list[str] | None, typer.Option(metavar="R:S", help="A lost worker; may be repeated.")
    ] = None,
    durations: Annotated[
        str | None,
        typer.Option(metavar="F,B,W", help="For every stage, stage 0 too. Default 1,1,1."),
    ] = None,
    in_flight: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Micro-batches a worker may hold; or one per stage: 4,3,2,1."
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Per-stage durations and limits as JSON.")
    ] = None,
    variant: Annotated[
        Variant, typer.Option(help="How a step may be arranged.")
    ] = Variant.DECOUPLED_STAGGERED,
    improve: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most time for the improver.")
    ] = IMPROVE_S,
    exact: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most time for the exact solver (ortools).")
    ] = 0.0,
    output_format: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.GRID,
    out: Annotated[
        Path | None, typer.Option(help="Write there instead; a directory with --prepare.")
    ] = None,
    prepare: Annotated[
        int,
        typer.Option(metavar="N", help="Plan ahead for every set of up to N losses, into --out."),
    ] = 0,
    logging: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|all",
            help="Instead: which boundaries to log within so many bytes, and what more would buy.",
        ),
    ] = None,
    boundary_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What passes a boundary in a step, each way: 12MB, or 12MB:6MB; or one each.",
        ),
    ] = None,
    interval: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Between two checkpoints.")
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS",
            help="Of a step on every stage; or one each. Default: as --durations say.",
        ),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="Of a stage's checkpoint; or one each. Default 0."),
    ] = None,
    failures: Annotated[
        str | None,
        typer.Option(metavar="RATES", help="Of each stage, in any unit. Default: all alike."),
    ] = None,
    helpers: Annotated[
        int | None, typer.Option(help="Most idle workers that help. Default: all.")
    ] = None,
) -> None:
    """The schedule of a step for any set of lost workers, with its period, bound and baselines.

    With --logging: what a byte of log buys when a stage has lost its last worker.
    """
    about_logs = LoggingFlags(
        budget=logging,
        boundary_bytes=boundary_bytes,
        interval=interval,
        replay=replay,
        load=load,
        failures=failures,
        helpers=helpers,
    )
    about_logs.check_beside(lost=lost, in_flight=in_flight, exact=exact, prepare=prepare)
    if logging is not None:
        timed = None
        if durations is not None or profile is not None:
            timed, _ = _costs(stages, durations=durations, in_flight=None, profile=profile)
        shape = replicas, stages, microbatches
        found = find_tradeoff(logging, about_logs, durations=timed, shape=shape)
        _show(tradeoff_text(found, output_format), out)
        return
    known, limits = _costs(stages, durations=durations, in_flight=in_flight, profile=profile)
    problem = Problem(
        replicas=replicas,
        stages=stages,
        microbatches=microbatches,
        lost=frozenset(WorkerId.parse(text, field="--lost") for text in lost or ()),
        durations=known,
        in_flight=limits,
        variant=variant,
    )
    for flag, value in (("--improve", improve), ("--exact", exact), ("--prepare", prepare)):
        if value < 0:
            raise ConfigError(flag, value, "must not be negative")
    effort = Effort(improve_s=improve, exact_s=exact)
    if prepare:
        from everstep.cli.prepare import prepare_plans

        prepare_plans(problem, effort, at_most=prepare, out=out)
        return
    made = plan(problem, effort)
    if output_format is Format.GRID and out is None:
        print_grid(made)
    else:
        _show(plan_text(made, output_format), out)


def _show(text: str, out: Path | None) -> None:
    if out is None:
        print(text)
        return
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", out, error.strerror or str(error)) from None


def _costs(
    stages: int, *, durations: str | None, in_flight: str | None, profile: Path | None
) -> tuple[Durations, tuple[int | None, ...] | None]:
    """Durations and limits from the flags or from a profile, never a mixture nobody asked for."""
    if profile is None:
        known, limits = _uniform(stages, durations), None
    elif durations is not None:
        raise ConfigError(
            "--durations", durations, "the profile has them already; give one of both"
        )
    else:
        known, limits = profile_from_json(_read(profile))
    if in_flight is not None:
        limits = _limits(in_flight, stages)
    return known, limits


def _read(profile: Path) -> str:
    try:
        return profile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--profile", profile, str(error)) from None


def _uniform(stages: int, durations: str | None) -> Durations:
    forward, input_gradient, weight_gradient = 1.0, 1.0, 1.0
    if durations is not None:
        try:
            forward, input_gradient, weight_gradient = map(float, durations.split(","))
        except ValueError:
            rule = "must be F,B,W: three numbers such as 1,1,1"
            raise ConfigError("--durations", durations, rule) from None
    return Durations.uniform(
        max(stages, 0),
        forward=forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
    )


def _limits(in_flight: str, stages: int) -> tuple[int, ...]:
    try:
        limits = tuple(map(int, in_flight.split(",")))
    except ValueError:
        rule = "must be a whole number, or one per stage such as 4,3,2,1"
        raise ConfigError("--in-flight", in_flight, rule) from None
    return limits * stages if len(limits) == 1 else limits
