"""Runs the user's script in a worker, as `python SCRIPT ARGS` would, and reports what it raises.

An exception goes to the coordinator, which shows it once; it is printed here only when the
coordinator cannot be told.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path
from types import TracebackType

from everstep.core.errors import CoordinatorGone, CoordinatorStopped
from everstep.launch.context import WorkerContext, current_worker
from everstep.launch.orders import Fork
from everstep.membership.messages import Failed


def run_worker(order: Fork) -> int:
    """Returns the exit code."""
    _prepare(order)
    context = current_worker()
    try:
        runpy.run_path(order.script, run_name="__main__")
    except SystemExit as leaving:
        return _exit_code(leaving)
    except CoordinatorStopped:
        return 0  # the job is over, and the coordinator knows why
    except Exception as error:  # noqa: BLE001  whatever the user's code raises ends the job
        _report(context, _failure(error, order.script))
        return 1
    finally:
        if context is not None:
            context.close()
    return 0


def _exit_code(leaving: SystemExit) -> int:
    """As Python does it: a number is the code, anything else is an error message."""
    match leaving.code:
        case None:
            return 0
        case int(code):
            return code
        case message:
            sys.stderr.write(f"{message}\n")
            return 1


def _prepare(order: Fork) -> None:
    os.environ.update(order.environment)
    # For libraries that are loaded later; those loaded already are told below.
    os.environ["OMP_NUM_THREADS"] = str(order.num_threads)
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(order.num_threads)
    sys.argv = [order.script, *order.args]
    sys.path.insert(0, str(Path(order.script).resolve().parent))
    for stream in (sys.stdout, sys.stderr):
        # A pipe would be buffered in blocks, and the last words of a killed worker lost.
        getattr(stream, "reconfigure", lambda **_: None)(line_buffering=True)


def _failure(error: Exception, script: str) -> Failed:
    frames = _from_script(error.__traceback__, script)
    text = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, SyntaxError):
        return Failed(text, f"{error.filename}:{error.lineno}")
    innermost = traceback.extract_tb(frames)[-1]
    return Failed(text, f"{innermost.filename}:{innermost.lineno}")


def _from_script(frames: TracebackType | None, script: str) -> TracebackType | None:
    """Without our own frames and runpy's; all of them when the script never ran."""
    frame = frames
    while frame is not None and frame.tb_frame.f_code.co_filename != script:
        frame = frame.tb_next
    return frame or frames


def _report(context: WorkerContext | None, failure: Failed) -> None:
    try:
        if context is not None:
            # It may have failed before it ever connected.
            client = context.client or context.connect(data_address="")
            client.send(failure)
            return
    except CoordinatorStopped:
        return  # another worker was faster: its traceback is shown, or the job is over anyway
    except CoordinatorGone:
        pass
    sys.stderr.write(failure.traceback)
