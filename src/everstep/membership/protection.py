"""What brings a stage back when it is lost, best first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from everstep.core.ids import WorkerId
from everstep.membership.facts import JobFacts

COPIES, LOG, CHECKPOINT = "copies", "log", "checkpoint"


def protection(job: JobFacts, live: Iterable[WorkerId]) -> dict[str, list[str]]:
    """By stage, for the event of that name. Empty: the loss of its last worker ends the job."""
    num_workers = Counter(place.stage for place in live)
    return {
        str(stage): [
            means
            for means, is_there in (
                (COPIES, count > 1),
                (LOG, job.log is not None),
                (CHECKPOINT, job.is_saved),
            )
            if is_there
        ]
        for stage, count in sorted(num_workers.items())
    }
