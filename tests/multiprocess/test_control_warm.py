"""The warm parent and the processes it forks."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from everstep.core.errors import WarmParentLost
from everstep.launch.orders import Exited, Warm
from everstep.launch.warm import ParentGone, Script, WarmParent, WorkerProcess

pytestmark = pytest.mark.timeout(60)


class Nursery:
    def __init__(self, *, preload: tuple[str, ...], folder: Path) -> None:
        self.reports: queue.SimpleQueue[Warm | Exited | ParentGone] = queue.SimpleQueue()
        self.parent = WarmParent(self.reports.put, preload=preload)
        self._folder = folder
        assert isinstance(self.reports.get(timeout=40), Warm)

    def spawn(self, text: str, *, uid: str = "w", num_threads: int = 1) -> WorkerProcess:
        path = self._folder / f"{uid}.py"
        path.write_text(dedent(text))
        return self.parent.spawn(
            Script(path, ("--lr", "1")), uid=uid, environment={"X": uid}, num_threads=num_threads
        )

    def exit_code(self) -> int:
        report = self.reports.get(timeout=20)
        assert isinstance(report, Exited)
        return report.code


def read_all(process: WorkerProcess) -> str:
    with os.fdopen(process.output) as pipe:
        return pipe.read()


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(preload=(), folder=tmp_path)
    with made.parent:
        yield made


def test_torch_is_imported_once_for_all_workers(tmp_path: Path) -> None:
    nursery = Nursery(preload=("torch",), folder=tmp_path)
    text = """
        import os, sys
        was_there = "torch" in sys.modules
        import torch
        print(was_there, os.getppid(), torch.get_num_threads(), torch.ones(4, 4).sum().item())
    """
    with nursery.parent:
        processes = [nursery.spawn(text, uid=f"w{i}", num_threads=1) for i in range(3)]
        assert [nursery.exit_code() for _ in processes] == [0, 0, 0]
        lines = [read_all(process).split() for process in processes]
    assert [line[0] for line in lines] == ["True"] * 3
    assert len({line[1] for line in lines}) == 1
    assert [line[2:] for line in lines] == [["1", "16.0"]] * 3


def test_a_script_runs_as_python_would_run_it(nursery: Nursery, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("name = 'beside the script'")
    text = """
        import atexit, os, sys, threading, time
        import neighbour
        atexit.register(print, "atexit ran")
        print(__name__, sys.argv[1:], os.environ["X"], neighbour.name)
        print("error output", file=sys.stderr)
        threading.Thread(target=lambda: (time.sleep(0.05), print("thread ran"))).start()
    """
    process = nursery.spawn(text)
    assert read_all(process).splitlines() == [
        "__main__ ['--lr', '1'] w beside the script",
        "error output",
        "thread ran",
        "atexit ran",
    ]
    assert nursery.exit_code() == 0


def test_exits_are_reported_with_the_code_or_the_signal(nursery: Nursery) -> None:
    os.close(nursery.spawn("import sys; sys.exit(3)").output)
    assert nursery.exit_code() == 3
    complains = nursery.spawn("import sys; sys.exit('no data')")
    assert read_all(complains) == "no data\n"
    assert nursery.exit_code() == 1
    os.close(nursery.spawn("import os; os.kill(os.getpid(), 9)").output)
    assert nursery.exit_code() == -9
    sleeper = nursery.spawn("import time; time.sleep(60)")
    nursery.parent.signal(sleeper, signal.SIGTERM)
    assert nursery.exit_code() == -15
    os.close(sleeper.output)


def test_without_a_coordinator_the_traceback_is_printed(nursery: Nursery) -> None:
    process = nursery.spawn("def f():\n    raise KeyError('k')\nf()")
    output = read_all(process)
    assert output.startswith("Traceback")
    assert output.count('File "') == 2  # the script's frames, none of ours
    assert output.endswith("KeyError: 'k'\n")
    assert nursery.exit_code() == 1


def test_a_syntax_error_is_reported_too(nursery: Nursery) -> None:
    process = nursery.spawn("def f(:")
    assert "SyntaxError" in read_all(process)
    assert nursery.exit_code() == 1


def test_what_a_worker_started_goes_with_it(nursery: Nursery) -> None:
    process = nursery.spawn(
        """
        import os, subprocess
        subprocess.Popen(["sleep", "60"])
        os.kill(os.getpid(), 9)
        """
    )
    assert nursery.exit_code() == -9
    assert read_all(process) == ""  # ends only when the last holder of the pipe is gone


def test_workers_die_with_their_parent(nursery: Nursery) -> None:
    process = nursery.spawn(
        """
        import os, time
        print(os.getppid())
        time.sleep(60)
        """
    )
    with os.fdopen(process.output) as pipe:
        os.kill(int(pipe.readline()), signal.SIGKILL)
        assert pipe.read() == ""
    assert isinstance(nursery.reports.get(timeout=10), ParentGone)
    with pytest.raises(WarmParentLost):
        nursery.spawn("pass")
