"""`everstep status`: the live job, from its coordinator."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from everstep.core.errors import ConfigError, CoordinatorLost
from everstep.launch.registry import running_jobs

ANSWER_WITHIN_S = 5.0


def add_to(app: typer.Typer) -> None:
    app.command("status")(status_command)


def status_command(
    at: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Default: the newest job here.")
    ] = None,
    token: Annotated[str, typer.Option(envvar="EVERSTEP_JOB_TOKEN", help="Of the job.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="All of it, as JSON.")] = False,
) -> None:
    """The live job: its workers, generation, plan and last events."""
    if at is None:
        jobs = running_jobs()
        if not jobs:
            raise ConfigError("--at", "not given", "no job runs on this machine; name one")
        at, token = jobs[0].address, jobs[0].token
    status = _fetch(at, token)
    print(json.dumps(status) if as_json else _text(status))


def _fetch(address: str, token: str) -> dict[str, Any]:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(f"http://{address}/status")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    # A proxy has no business between a user and a coordinator.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ANSWER_WITHIN_S) as answer:
            document: dict[str, Any] = json.load(answer)
            return document
    except urllib.error.HTTPError as error:
        raise CoordinatorLost(address, why=error.read().decode(errors="replace")) from None
    except (OSError, ValueError) as error:
        raise CoordinatorLost(address, why=str(error)) from None


def _text(status: dict[str, Any]) -> str:
    plan = status["plan"]
    lines = [
        f"job at {status['address']}: {status['replicas']} replicas x {status['stages']} stages,"
        f" generation {status['generation']},"
        f" finished step {status['finished_step']} of {status['steps']}",
    ]
    if plan is not None:
        lines.append(f"plan: period {plan['period']:.4g} {plan['unit']}, bound {plan['bound']:.4g}")
    lines.append(f"{'worker':8}{'host':16}{'pid':>8}  {'state':12}{'step':>6}")
    workers = sorted(status["workers"], key=lambda w: (w["stage"] or 0, w["replica"] or 0))
    for worker in workers:
        place = f"{worker['replica']}:{worker['stage']}"
        lines.append(
            f"{place:8}{worker['host']:16}{worker['pid']:>8}"
            f"  {worker['state']:12}{worker['step']:>6}"
        )
    lines += [f"  {_event(event)}" for event in status["events"][-5:]]
    return "\n".join(lines)


def _event(event: dict[str, Any]) -> str:
    shown = {k: v for k, v in event.items() if not isinstance(v, dict | list) and k != "time"}
    return " ".join(f"{key}={value}" for key, value in shown.items())
