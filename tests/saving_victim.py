"""A trainer that is killed in the middle of a save. Started by name, so it must be importable."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

from everstep.checkpoint.engine import Engine, EngineSettings
from everstep.testing.crashes import WAIT_S
from states import state_of


def save_and_die(pipe: Connection, directory: Path) -> None:
    """Dies by SIGKILL as soon as the writer has it all; the writer has not written a byte yet."""
    engine = Engine(directory, settings=EngineSettings(probe_bytes=0))
    engine.start_writer()
    engine.prepare(state_of(1))
    writer_pid = engine.writer_pid
    assert writer_pid is not None
    os.kill(writer_pid, signal.SIGSTOP)
    engine.save(1, state_of(1))
    engine.wait_handed_over(WAIT_S)
    pipe.send(writer_pid)
    os.kill(os.getpid(), signal.SIGKILL)
