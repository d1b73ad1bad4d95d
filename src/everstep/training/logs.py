"""Whether and how a job's workers log: the concrete classes behind `Job(log=...)`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from everstep.checkpoint.run_record import local_directory
from everstep.comm.group import Group
from everstep.execute.data import PARTS, Fetcher
from everstep.execute.replay import Piece
from everstep.membership.facts import ClipMode, LogFacts, Replay
from everstep.recovery.log import BoundaryLog
from everstep.recovery.log_memory import keep_freed_memory
from everstep.training.holding import Holding, build_pieces, fetcher_for
from everstep.training.job import Job
from everstep.training.loading import load_step_together
from everstep.training.rebuilding import Rebuilder, give_state, tree_of
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
    keep_freed_memory(job.log.memory_bytes)
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
        return local_directory(job.checkpoint.directory) / "log"
    return Path(tempfile.gettempdir()) / "everstep-log"


def _as_built(holding: Holding, replay: Replay) -> list[Piece]:
    return build_pieces(
        holding.job,
        replay.first_stage,
        replay.last_stage,
        replicas=holding.replicas,
        num_stages=holding.stage.num_stages,
        device=holding.stage.device,
    )


def _to_be_loaded(holding: Holding, replay: Replay, *, own: Piece | None) -> list[Piece]:
    """The stages of the range: `own` for this worker's, if that is to be rebuilt; a state that is
    in use is left alone."""
    span = range(replay.first_stage, replay.last_stage + 1)
    found = [own if index == holding.me.stage else holding.piece(index) for index in span]
    if None in found:
        fresh = _as_built(holding, replay)
        return [piece or new for piece, new in zip(found, fresh, strict=True)]
    return [piece for piece in found if piece is not None]


def rebuilder(holding: Holding, log: StageLog) -> Rebuilder:
    job = holding.job

    @contextmanager
    def pieces(replay: Replay, *, own: Piece, group: Group) -> Iterator[list[Piece]]:
        is_rebuilt = holding.me in replay.rebuilt
        if replay.checkpoint < 0:
            found = _as_built(holding, replay)
            if is_rebuilt:
                mine = holding.me.stage - replay.first_stage
                give_state(found[mine], to=own)
                found[mine] = own
        else:
            assert job.checkpoint is not None, "only a job with checkpoints has saved one"
            found = _to_be_loaded(holding, replay, own=own if is_rebuilt else None)
            for piece in found:
                load_step_together(
                    job.checkpoint.directory, replay.checkpoint, tree_of(piece), group
                )
        try:
            yield found
        finally:
            for piece in found:
                if piece is not own:
                    piece.stage.let_go()

    def fetcher(first: int, last: int) -> Fetcher | None:
        needed = {"input": first == 0, "target": last == holding.stage.num_stages - 1}
        parts = [part for part in PARTS if needed[part]]
        return fetcher_for(job, parts, replicas=holding.replicas, device=holding.stage.device)

    return Rebuilder(
        log,
        me=holding.me,
        replicas=holding.replicas,
        microbatches=job.microbatches,
        is_post_validated=job.clip_mode is ClipMode.POST_VALIDATED,
        pieces=pieces,
        fetcher=fetcher,
    )
