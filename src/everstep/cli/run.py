"""`everstep run`, `coordinator` and `agent`: a job on this machine, or its parts on many."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from everstep.core.errors import ConfigError
from everstep.core.events import EventLog, Subscriber

if TYPE_CHECKING:
    from everstep.membership.coordinator import Coordinator
    from everstep.membership.traffic import Outcome

Replicas = Annotated[int, typer.Option(help="Copies of the model.")]
Stages = Annotated[int, typer.Option(help="Slices of the model, one worker each.")]
Port = Annotated[int, typer.Option(help="Of the coordinator; 0 for any free one.")]
Host = Annotated[str, typer.Option(help="The address to listen on.")]
Token = Annotated[
    str, typer.Option(envvar="EVERSTEP_JOB_TOKEN", help="A secret; needed beyond loopback.")
]
Events = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append events there, one JSON object a line.")
]
DEFAULT_REPLACE_AFTER = "5"
ReplaceAfter = Annotated[
    str,
    typer.Option(metavar="SECONDS|never", help="When a lost worker is started again."),
]
ScriptPath = Annotated[Path, typer.Argument(metavar="SCRIPT", help="The training script.")]
ScriptArgs = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...")]

# What follows SCRIPT belongs to the script, flags too.
SCRIPT_LAST = {"allow_interspersed_args": False}


def add_to(app: typer.Typer) -> None:
    app.command("run", context_settings=SCRIPT_LAST)(run_command)
    app.command("coordinator")(coordinator_command)
    app.command("agent", context_settings=SCRIPT_LAST)(agent_command)


def run_command(
    script: ScriptPath,
    replicas: Replicas,
    stages: Stages,
    args: ScriptArgs = None,
    host: Host = "127.0.0.1",
    port: Port = 0,
    token: Token = "",
    events: Events = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="R:S@STEP", help="Kill a worker during a step; may be repeated."),
    ] = None,
    replace_after: ReplaceAfter = DEFAULT_REPLACE_AFTER,
) -> None:
    """Trains SCRIPT with a coordinator and all workers on this machine."""
    _check_script(script)
    from everstep.testing.faults import KillAt, Killer

    killer = Killer([KillAt.parse(text, field="--kill") for text in kill or ()])
    # Loads torch, which the other commands do without.
    from everstep.launch.local import run_local
    from everstep.launch.warm import Script

    bind = Binding(host=host, port=port, token=token)
    with local_coordinator(
        replicas,
        stages,
        bind=bind,
        events=events,
        replace_after_s=_seconds_or_never(replace_after),
        subscriber=killer.note,
    ) as coordinator:
        outcome = run_local(Script(script, tuple(args or ())), coordinator=coordinator)
    leave(outcome)


def coordinator_command(
    replicas: Replicas,
    stages: Stages,
    host: Host = "127.0.0.1",
    port: Port = 0,
    token: Token = "",
    events: Events = None,
    replace_after: ReplaceAfter = DEFAULT_REPLACE_AFTER,
) -> None:
    """Coordinates a job whose workers are started by agents, here or elsewhere."""
    import asyncio

    from everstep.launch.local import stopping_on_signals

    bind = Binding(host=host, port=port, token=token)
    with local_coordinator(
        replicas,
        stages,
        bind=bind,
        events=events,
        replace_after_s=_seconds_or_never(replace_after),
        may_take_over=True,
    ) as coordinator:
        print(f"listening on {coordinator.address}", flush=True)

        def stop(outcome: Outcome) -> None:
            coordinator.request_stop(outcome.why, exit_code=outcome.exit_code)

        with stopping_on_signals(stop):
            outcome = asyncio.run(coordinator.serve())
    leave(outcome)


def agent_command(
    script: ScriptPath,
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="The coordinator.")],
    workers: Annotated[int, typer.Option(help="How many this node runs.")],
    args: ScriptArgs = None,
    host: Annotated[
        str | None, typer.Option(help="This node's address, where workers elsewhere reach it.")
    ] = None,
    token: Token = "",
) -> None:
    """Runs workers of SCRIPT on this node for the coordinator at HOST:PORT."""
    _check_script(script)
    if workers < 1:
        raise ConfigError("--workers", workers, "must be at least 1")
    from everstep.launch.agent import Agent, AgentSettings
    from everstep.launch.local import stopping_on_signals
    from everstep.launch.warm import Script

    settings = AgentSettings(address=join, workers=workers, token=token, host=host)
    agent = Agent(Script(script, tuple(args or ())), settings)
    with stopping_on_signals(agent.request_stop):
        outcome = agent.run()
    leave(outcome)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Where the coordinator listens, as the flags say."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = ""


@contextmanager
def local_coordinator(
    replicas: int,
    stages: int,
    *,
    events: Path | None,
    bind: Binding | None = None,
    replace_after_s: float | None = None,
    subscriber: Subscriber | None = None,
    may_take_over: bool = False,
) -> Iterator[Coordinator]:
    """A coordinator that shows its progress, writes its events and can be found by `status`. It may
    take over from another that wrote to the same events, when workers outlive their coordinator."""
    bind = bind or Binding()
    for flag, value in (("--replicas", replicas), ("--stages", stages)):
        if value < 1:
            raise ConfigError(flag, value, "must be at least 1")
    from everstep.cli.progress import Progress
    from everstep.launch.registry import announced
    from everstep.membership.access import Bind
    from everstep.membership.roster import Shape
    from everstep.membership.world import WorldSettings
    from everstep.training.coordinating import coordinator_of, read_told

    told = read_told(events) if may_take_over and events is not None else None
    with ExitStack() as stack:
        try:
            log = stack.enter_context(EventLog(events))
        except OSError as error:
            raise ConfigError("--events", events, error.strerror or str(error)) from None
        progress = stack.enter_context(Progress(replicas=replicas, stages=stages))
        log.subscribe(progress.show)
        if subscriber is not None:
            log.subscribe(subscriber)
        coordinator = stack.enter_context(
            coordinator_of(
                Shape(replicas, stages),
                bind=Bind(host=bind.host, port=bind.port, token=bind.token),
                events=log,
                settings=WorldSettings(replace_after_s=replace_after_s),
                told=told,
            )
        )
        stack.enter_context(announced(coordinator.address, token=bind.token))
        yield coordinator


def _seconds_or_never(text: str) -> float | None:
    if text == "never":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError("--replace-after", text, "must be a number of seconds, or never")
    return seconds


def _check_script(script: Path) -> None:
    if not script.is_file():
        raise ConfigError("SCRIPT", script, "there is no such file")
    if not os.access(script, os.R_OK):
        raise ConfigError("SCRIPT", script, "cannot be read")


def leave(outcome: Outcome) -> None:
    """Says why a job ended, once, with the traceback of the worker that ended it."""
    if outcome.exit_code == 0:
        return
    if outcome.traceback:
        print(outcome.traceback.rstrip("\n"), file=sys.stderr)
    print(f"everstep: {outcome.why}", file=sys.stderr)
    raise typer.Exit(outcome.exit_code)
