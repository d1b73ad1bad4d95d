"""A whole job on this machine: the coordinator on a thread, the agent on the caller's."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from everstep.launch.agent import Agent, AgentSettings
from everstep.launch.output import Sink, write_line
from everstep.launch.warm import PRELOAD, Script
from everstep.membership.coordinator import Coordinator, start_coordinator
from everstep.membership.traffic import Outcome

SIGNALS = (signal.SIGINT, signal.SIGTERM)
END_WITHIN_S = 5.0


def run_local(
    script: Script,
    *,
    coordinator: Coordinator,
    sink: Sink = write_line,
    preload: tuple[str, ...] = PRELOAD,
) -> Outcome:
    """Runs the job to its end; SIGINT and SIGTERM end it within five seconds.

    Nothing is printed but workers' output: the traceback of a failed script is in the outcome.
    """
    settings = AgentSettings(
        address=coordinator.address,
        token=coordinator.token,
        workers=coordinator.num_workers,
        preload=preload,
        return_within_s=0.0,  # it would come back in another process, so with another agent
    )
    agent = Agent(script, settings, sink=sink)

    def stop(outcome: Outcome) -> None:
        coordinator.request_stop(outcome.why, exit_code=outcome.exit_code)
        agent.request_stop(outcome)

    with start_coordinator(coordinator), stopping_on_signals(stop):
        ours = agent.run()
        coordinator.request_stop(ours.why, exit_code=ours.exit_code)
        theirs = coordinator.wait_ended(timeout_s=END_WITHIN_S)
    return theirs if theirs.exit_code != 0 else ours


@contextmanager
def stopping_on_signals(stop: Callable[[Outcome], None]) -> Iterator[None]:
    """Calls `stop` on SIGINT and SIGTERM. Python allows that on the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: FrameType | None) -> None:
        stop(Outcome(exit_code=128 + number, why=f"{signal.Signals(number).name} was received"))

    before = {number: signal.signal(number, on_signal) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
