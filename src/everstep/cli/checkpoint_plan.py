"""`everstep checkpoint plan`: where each policy would put the checkpoints of a recorded run."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.core.errors import ConfigError

if TYPE_CHECKING:
    from everstep.checkpoint.policy import Policy
    from everstep.checkpoint.rehearsal import Recording


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"
    SVG = "svg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one policy would do in this run, and what that is expected to cost."""

    policy: str
    steps: tuple[int, ...]
    stall_s: float
    lost_work_s: float
    lost_progress_fraction: float
    """Of all that the run gains."""


def add_to(verbs: typer.Typer) -> None:
    verbs.command("plan")(checkpoint_plan_command)


def checkpoint_plan_command(
    loss_csv: Annotated[
        Path, typer.Option(metavar="FILE", help="A recorded run: columns `step` and `loss`.")
    ],
    cost: Annotated[
        float, typer.Option(metavar="SECONDS", help="What a checkpoint stalls training.")
    ],
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="PER_HOUR",
            help="Failures of the job that force a rollback. Default: one in 50,000 worker-hours.",
        ),
    ] = None,
    step_time: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long a step takes.")
    ] = 1.0,
    durable: Annotated[
        float, typer.Option(metavar="SECONDS", help="From a checkpoint's start until it is safe.")
    ] = 0.0,
    workers: Annotated[int, typer.Option(help="How many workers train.")] = 1,
    budget: Annotated[
        float, typer.Option(metavar="SHARE", help="Most of the time that stalls may take.")
    ] = 0.035,
    epoch: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Steps of one pass over the data.")
    ] = None,
    output_format: Annotated[
        Format, typer.Option("--format", help="What to print.")
    ] = Format.TABLE,
    out: Annotated[Path | None, typer.Option(help="Write there instead.")] = None,
) -> None:
    """Where each policy would put the checkpoints of a recorded run, seeing only the past."""
    run = _recording(
        _read_losses(loss_csv),
        cost=cost,
        per_hour=rate,
        step_time=step_time,
        durable=durable,
        workers=workers,
        epoch=epoch,
    )
    rows = [_row(name, steps, run) for name, steps in _placements(run, budget).items()]
    text = _text(rows, run, output_format, title=loss_csv.stem)
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", out, error.strerror or str(error)) from None


def _read_losses(path: Path) -> list[float]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if "loss" not in (rows.fieldnames or ()):
                raise ConfigError("--loss-csv", path, "must have a column named `loss`")
            losses = [float(row["loss"]) for row in rows]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--loss-csv", path, str(error)) from None
    except (TypeError, ValueError) as error:
        raise ConfigError("--loss-csv", path, f"every loss must be a number ({error})") from None
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        raise ConfigError("--loss-csv", path, "must hold at least 2 losses, all of them finite")
    return losses


def _recording(
    losses: list[float],
    *,
    cost: float,
    per_hour: float | None,
    step_time: float,
    durable: float,
    workers: int,
    epoch: int | None,
) -> Recording:
    import numpy as np

    from everstep.checkpoint.failure_rate import FailureRate
    from everstep.checkpoint.policy import Costs
    from everstep.checkpoint.rehearsal import Recording, watch

    for flag, value, least in (("--workers", workers, 1), ("--epoch", epoch or 1, 1)):
        if value < least:
            raise ConfigError(flag, value, f"must be at least {least}")
    if per_hour is not None and not 0 < per_hour < math.inf:
        raise ConfigError("--rate", per_hour, "must be failures per hour, above 0")
    for flag, seconds in (("--cost", cost), ("--step-time", step_time)):
        if not 0 < seconds < math.inf:
            raise ConfigError(flag, seconds, "must be more than 0 seconds")
    if not 0 <= durable < math.inf:
        raise ConfigError("--durable", durable, "must not be negative")
    per_second = FailureRate().per_second(workers) if per_hour is None else per_hour / 3600
    ones = np.ones(len(losses))
    return Recording(
        losses=np.array(losses),
        curves=watch(np.array(losses)),
        seconds=step_time * ones,
        workers=workers * ones,
        failure_rate=per_second * ones,
        costs=Costs(step_s=step_time, stall_s=cost, durable_s=max(durable, cost)),
        loader_length=epoch,
    )


def _placements(run: Recording, budget: float) -> dict[str, tuple[int, ...]]:
    from everstep.checkpoint.baselines import CheckFreq, PerEpoch, YoungDaly, coci_published
    from everstep.checkpoint.objectives import BestModelAtStop, GpuHours, LostProgress, WallClock
    from everstep.checkpoint.placement import place, place_evenly
    from everstep.checkpoint.rehearsal import rehearse

    ours = LostProgress(budget=budget)
    job_s = float(run.seconds.sum())
    policies: dict[str, Policy] = {
        "LostProgress (default)": ours,
        "WallClock": WallClock(),
        "GpuHours": GpuHours(),
        "BestModelAtStop": BestModelAtStop(hazard=1 / job_s),
        "YoungDaly": YoungDaly(),
        "CheckFreq": CheckFreq(),
        "coci_published": coci_published,
    }
    if run.loader_length is not None:
        policies["PerEpoch"] = PerEpoch()
    marks = {name: rehearse(policy, run) for name, policy in policies.items()}
    most = int(budget * job_s / run.costs.stall_s)
    number = len(marks["LostProgress (default)"])
    marks["as many, evenly"] = place_evenly(len(run.losses), number)
    marks["best with hindsight"] = place(ours.prices(run.outlook()), at_most=most)
    return marks


def _row(name: str, steps: tuple[int, ...], run: Recording) -> Row:
    import numpy as np

    from everstep.checkpoint.objectives import LostProgress, WallClock
    from everstep.checkpoint.placement import expected_price

    outlook = run.outlook()
    free = np.zeros_like(outlook.seconds)
    lost_s, lost_gain = (
        expected_price(replace(objective.prices(outlook), checkpoint=free), steps)
        for objective in (WallClock(), LostProgress())
    )
    return Row(
        policy=name,
        steps=steps,
        stall_s=len(steps) * run.costs.stall_s,
        lost_work_s=lost_s,
        lost_progress_fraction=lost_gain / float(outlook.gain.sum()),
    )


def _text(rows: list[Row], run: Recording, output_format: Format, *, title: str) -> str:
    match output_format:
        case Format.TABLE:
            return _table(rows, run)
        case Format.JSON:
            return _json(rows, run)
        case Format.SVG:
            from everstep.checkpoint.picture import render_svg

            return render_svg(
                run.losses,
                {row.policy: row.steps for row in rows},
                title=f"Where checkpoints go: {title}",
                notes=_facts(run),
            )


def _facts(run: Recording) -> str:
    per_hour = 3600 * float(run.failure_rate[0])
    return (
        f"{len(run.losses)} steps of {run.costs.step_s:g} s, a checkpoint stalls"
        f" {run.costs.stall_s:g} s, {per_hour:.3g} failures per hour force a rollback"
    )


def _table(rows: list[Row], run: Recording) -> str:
    num_steps, job_s = len(run.losses), float(run.seconds.sum())
    lines = [
        _facts(run),
        "",
        f"{'':23}{'':>6}   {'in each quarter of the run':^27}{'':>8}{'expected to be lost':>24}",
        f"{'policy':23}{'saves':>6}   {'1st':>6}{'2nd':>7}{'3rd':>7}{'4th':>7}{'stalls':>8}"
        f"{'work':>12}{'progress':>12}",
    ]
    for row in rows:
        quarters = [0] * 4
        for step in row.steps:
            quarters[min(3, 4 * (step - 1) // num_steps)] += 1
        counts = "".join(f"{count:>7}" for count in quarters)
        lines.append(
            f"{row.policy:23}{len(row.steps):>6}  {counts}{row.stall_s / job_s:>8.2%}"
            f"{row.lost_work_s:>10.4g} s{row.lost_progress_fraction:>12.3%}"
        )
    return "\n".join([*lines, ""])


def _json(rows: list[Row], run: Recording) -> str:
    document = {
        "num_steps": len(run.losses),
        "step_seconds": run.costs.step_s,
        "stall_seconds": run.costs.stall_s,
        "failures_per_second": float(run.failure_rate[0]),
        "policies": [
            {
                "policy": row.policy,
                "steps": list(row.steps),
                "stall_seconds": row.stall_s,
                "expected_lost_work_seconds": row.lost_work_s,
                "expected_lost_progress_fraction": row.lost_progress_fraction,
            }
            for row in rows
        ],
    }
    return json.dumps(document, indent=2) + "\n"
