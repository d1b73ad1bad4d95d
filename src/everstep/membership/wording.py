"""What events and errors say of workers and of jobs that differ. Pure."""

from __future__ import annotations

from everstep.membership.facts import JobFacts
from everstep.membership.roster import Worker


def who(worker: Worker) -> dict[str, object]:
    replica, stage = worker.place if worker.place is not None else (None, None)
    return {"replica": replica, "stage": stage, "pid": worker.hello.pid}


def differences(job: JobFacts, other: JobFacts) -> str:
    names = [n for n in job.__struct_fields__ if getattr(job, n) != getattr(other, n)]
    return ", ".join(
        f"{name} is {getattr(job, name)} here and {getattr(other, name)} elsewhere"
        for name in names
    )
