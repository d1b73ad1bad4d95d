"""What messages carry: facts of the job, of logs, of members and of what they are to do.

Closed, frozen values, which the coordinator's rooms pass around as they came.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everstep.core.ids import WorkerId


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a message."""


class ClipMode(StrEnum):
    SYNCHRONOUS = "synchronous"
    POST_VALIDATED = "post-validated"


class LogFacts(_Value, frozen=True, kw_only=True):
    """How a job's boundaries are logged, as far as the coordinator must know."""

    budget_bytes: int
    """Of one worker's log, in memory and on disk."""

    helpers: int | None = None
    """How many workers at most help a lost stage to replay; None: all that wait anyway."""


class LogDirection(StrEnum):
    FORWARD = "forward"
    """Activations, from stage b to b + 1."""

    BACKWARD = "backward"
    """Input gradients, from stage b + 1 to b."""


class LogRun(_Value, frozen=True):
    """Entries of one worker's log: consecutive steps with the same micro-batches."""

    boundary: int
    """Between this stage and the next."""

    direction: LogDirection
    first_step: int
    last_step: int
    attempt: int
    """The generation that ran the steps."""

    microbatches: tuple[int, ...]
    """Numbered over the whole step: replica * micro-batches + micro-batch."""


class LogSource(_Value, frozen=True):
    """Who holds what a replay needs of one boundary, for consecutive steps."""

    boundary: int
    direction: LogDirection
    first_step: int
    last_step: int
    attempt: int
    holders: tuple[WorkerId, ...]
    """For each micro-batch of a step."""


class Replay(_Value, frozen=True, kw_only=True):
    """Stages `first_stage` to `last_stage` run again the steps after `checkpoint`."""

    first_stage: int
    last_stage: int
    checkpoint: int
    """The step whose checkpoint they begin with; -1: as the model was built."""

    last_step: int
    replayers: tuple[WorkerId, ...]
    """Who computes: the new workers of the range first, then those who help."""

    rebuilt: tuple[WorkerId, ...]
    """Whose state it becomes; the others keep their own."""

    is_shared: bool
    """Each replayer runs its share of the micro-batches, and gradients are summed; else each runs
    them all, and gets the very bits that were lost."""

    sources: tuple[LogSource, ...]
    scales_from: WorkerId
    """One who knows how far the gradients of each step were scaled."""


class JobFacts(_Value, frozen=True, kw_only=True):
    """What the coordinator must know of a job, and all workers must agree on."""

    microbatches: int
    steps: int
    batch_size: int
    seed: int
    digest: str
    """Of everything else that must be equal, so that workers with differing scripts are refused."""

    in_flight: tuple[int, ...] | None = None
    """Micro-batches each stage may hold; None for no limit."""

    clip_norm: float | None = None
    clip_mode: ClipMode = ClipMode.SYNCHRONOUS
    is_saved: bool = False
    """It has checkpoints."""

    log: LogFacts | None = None
    """None: what crosses boundaries between stages is not logged."""


class StageProfile(_Value, frozen=True, kw_only=True):
    """Measured seconds: of one micro-batch for F, B, W and transfer, of one step for the others."""

    forward: float
    input_gradient: float
    weight_gradient: float
    transfer: float
    reduction: float
    optimizer: float
    sent_forward: int = 0
    """Bytes that a step sends to the next stage, over all workers of the stage."""

    sent_backward: int = 0
    """To the stage before."""


class RollBack(_Value, frozen=True):
    """Undo `step`, scale its gradients, and take it again."""

    step: int
    scale: float


class Member(_Value, frozen=True, kw_only=True):
    """One worker of a generation and where its data channels listen."""

    replica: int
    stage: int
    uid: str
    number: int
    pid: int
    data_address: str


class Meeting(_Value, frozen=True, kw_only=True):
    """Where the process groups of a generation meet, and the token of its data channels."""

    host: str
    port: int
    token: str = ""


class Copy(_Value, frozen=True):
    """The worker of replica `target` gets the state of that of replica `source`."""

    stage: int
    source: int
    target: int


class StepResult(_Value, frozen=True):
    """Of a step that a worker is given without having run it."""

    loss: float | None
    metrics: dict[str, float]


class Seat(_Value, frozen=True):
    """A worker to start: its number, and how its output is marked."""

    number: int
    label: str
