"""A job of real processes that only pretend to train: the script, and `run_local` around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

TESTS = Path(__file__).parent

TRAIN = """
    import os, sys, time
    from everstep.launch.context import current_worker
    from everstep.membership import messages as m
    from everstep.membership.facts import JobFacts, StageProfile

    context = current_worker()
    client = context.connect(data_address=context.host + ":1")
    place = client.wait_welcome()
    steps = int(sys.argv[1])
    client.send(m.Ready(JobFacts(microbatches=2, steps=steps, batch_size=8, seed=0, digest="d")))
    resume = client.wait_resume(after_generation=0, timeout_s=30)
    for step in range(resume.step, steps):
        client.wait_watermark(step - 1, timeout_s=30)
        client.take_replan(step)
        if step == 1:
            print("half a line,", end=" ")
            print("then the rest")
        {body}
        loss = 1.0 / (1 + step) if place.stage == place.stages - 1 else None
        client.send(m.StepDone(generation=resume.generation, step=step, seconds=0.0, loss=loss))
        if step + 1 == resume.step + resume.profile_steps:
            client.send(m.Profile(resume.generation, StageProfile(
                forward=0.5, input_gradient=1, weight_gradient=1,
                transfer=0, reduction=0, optimizer=0)))
    client.wait_watermark(steps - 1, timeout_s=30)
    client.send(m.Finished())
    {after}
"""

RUN = """
    import sys
    from pathlib import Path
    from everstep.core.events import EventLog
    from everstep.launch.local import run_local
    from everstep.launch.warm import Script
    from everstep.membership.coordinator import Coordinator
    from everstep.membership.facts import Meeting
    from everstep.membership.roster import Shape
    from everstep.membership.world import World
    from everstep.recovery.decide import decide_recovery
    from fake_planner import one_f_one_b

    script, events, preload, *args = sys.argv[1:]
    world = World(
        Shape(2, 2),
        planner=one_f_one_b,
        decide=decide_recovery,
        meeting=Meeting(host="127.0.0.1", port=1),
    )
    with EventLog(Path(events)) as log:
        outcome = run_local(
            Script(Path(script), tuple(args)),
            coordinator=Coordinator(world, events=log),
            preload=(preload,),
        )
    print("OUTCOME", outcome.exit_code, outcome.why)
    sys.stdout.write(outcome.traceback or "")
    sys.exit(outcome.exit_code)
"""


def write_script(folder: Path, *, body: str = "pass", after: str = "") -> Path:
    """`body` runs in each step, `after` when training is done. Takes the number of steps."""
    script = folder / "train.py"
    script.write_text(dedent(TRAIN).format(body=body, after=after))
    return script


class Job:
    """`run_local` in a process of its own."""

    def __init__(
        self,
        folder: Path,
        *,
        body: str = "pass",
        after: str = "",
        steps: int = 8,
        preload: str = "everstep.membership.client",
    ) -> None:
        self.events_file = folder / "events.jsonl"
        script = write_script(folder, body=body, after=after)
        driver = folder / "driver.py"
        driver.write_text(dedent(RUN))
        self.process = subprocess.Popen(
            [sys.executable, driver, script, self.events_file, preload, str(steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS), str(folder)])},
        )

    def wait(self, *, within_s: float = 40) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=within_s)
        return self.process.returncode, output

    def events(self, name: str) -> list[dict[str, object]]:
        if not self.events_file.exists():
            return []
        lines = self.events_file.read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_events(self, name: str, count: int) -> list[dict[str, object]]:
        deadline_s = time.monotonic() + 30
        while len(found := self.events(name)) < count:
            assert time.monotonic() < deadline_s, f"only {len(found)} {name} events after 30 s"
            assert self.process.poll() is None, self.wait()
            time.sleep(0.02)
        return found

    def left_behind(self) -> list[int]:
        pids = [event["pid"] for event in self.events("worker_joined")]
        return [pid for pid in pids if isinstance(pid, int) and Path(f"/proc/{pid}").exists()]
