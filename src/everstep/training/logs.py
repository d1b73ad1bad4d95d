"""Whether and how a job's workers log: the concrete classes behind `Job(log=...)`."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from everstep.execute.data import PARTS, Fetcher
from everstep.execute.replay import Piece
from everstep.membership.messages import ClipMode, LogFacts
from everstep.recovery.log import BoundaryLog
from everstep.training.holding import Holding, build_pieces, fetcher_for
from everstep.training.job import Job
from everstep.training.loading import load_step
from everstep.training.rebuilding import Rebuilder, tree_of
from everstep.training.stage_log import StageLog

logger = logging.getLogger("everstep")


def is_logged(job: Job, *, replicas: int) -> bool:
    """With replicas a copy is cheaper, so logging is off unless it is asked for even then."""
    if job.log is None or job.log.budget_bytes == 0:
        return False
    return replicas == 1 or job.log.with_replicas


def log_facts(job: Job, *, replicas: int) -> LogFacts | None:
    if job.log is None or not is_logged(job, replicas=replicas):
        return None
    return LogFacts(budget_bytes=job.log.budget_bytes, helpers=job.log.helpers)


def stage_log(holding: Holding) -> StageLog | None:
    job = holding.job
    if job.log is None or not is_logged(job, replicas=holding.replicas):
        return None
    log = BoundaryLog(
        _directory(job),
        memory_bytes=job.log.memory_bytes,
        # Of all workers together; which boundaries are logged sees to that (recovery/rebuild.py).
        budget_bytes=job.log.budget_bytes,
        on_warning=logger.warning,
    )
    return StageLog(log, microbatches=job.microbatches)


def _directory(job: Job) -> Path:
    """Beside the checkpoints, unless the user says where."""
    assert job.log is not None
    if job.log.directory is not None:
        return Path(job.log.directory)
    if job.checkpoint is not None:
        return Path(job.checkpoint.directory) / "log"
    return Path(tempfile.gettempdir()) / "everstep-log"


def rebuilder(holding: Holding, log: StageLog) -> Rebuilder:
    job = holding.job

    def pieces(first: int, last: int, *, checkpoint: int) -> list[Piece]:
        num_stages = holding.stage.num_stages
        built = build_pieces(job, first, last, replicas=holding.replicas, num_stages=num_stages)
        if checkpoint >= 0:
            assert job.checkpoint is not None, "only a job with checkpoints has saved one"
            for piece in built:
                load_step(Path(job.checkpoint.directory), checkpoint, tree_of(piece))
        return built

    def fetcher(first: int, last: int) -> Fetcher | None:
        needed = {"input": first == 0, "target": last == holding.stage.num_stages - 1}
        parts = [part for part in PARTS if needed[part]]
        return fetcher_for(job, parts, replicas=holding.replicas)

    return Rebuilder(
        log,
        me=holding.me,
        replicas=holding.replicas,
        microbatches=job.microbatches,
        is_post_validated=job.clip_mode is ClipMode.POST_VALIDATED,
        pieces=pieces,
        fetcher=fetcher,
    )
