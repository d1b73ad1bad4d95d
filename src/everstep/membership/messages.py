"""The messages between workers, agents and the coordinator. Their bytes: see codec.py."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from everstep.core.ids import WorkerId
from everstep.membership.action_rows import ActionRow
from everstep.membership.facts import (
    Copy,
    JobFacts,
    LogRun,
    Meeting,
    Member,
    Replay,
    RollBack,
    Seat,
    StageProfile,
    StepResult,
)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class Hello(_Message, frozen=True, kw_only=True):
    uid: str
    """Names the process for its whole life; never used twice."""

    number: int
    """Which of the job's workers it was started as."""

    pid: int
    host: str
    data_address: str


class Ready(_Message, frozen=True):
    job: JobFacts
    saved: int | None = None
    """The step of the newest checkpoint that it has found whole; None for none."""


class StepDone(_Message, frozen=True, kw_only=True):
    generation: int
    step: int
    seconds: float
    loss: float | None = None
    metrics: dict[str, float] = {}
    norm_squared: float | None = None
    """Of this stage's whole gradient, before clipping. Needed for post-validated clipping only."""

    breakdown: dict[str, float] = {}
    """Where the seconds went."""


class Profile(_Message, frozen=True):
    generation: int
    durations: StageProfile


class Halted(_Message, frozen=True):
    generation: int
    finished_step: int | None
    """The last step whose optimizer step was taken; -1 before the first, None without a state."""

    operations: int = 0
    """Evaluations and gatherings completed so far."""

    is_operating: bool = False
    """It was interrupted in one."""

    logged: tuple[LogRun, ...] = ()
    """What its log holds."""


class Broken(_Message, frozen=True):
    """A connection to a peer broke, or a peer was silent for too long."""

    generation: int
    cause: str


class Resumed(_Message, frozen=True):
    """Connected, and copied what was to be copied."""

    generation: int
    connect_s: float
    copy_s: float


class Copied(_Message, frozen=True):
    """Holds a copy of a peer's state, as of after `step`."""

    generation: int
    step: int


class Replayed(_Message, frozen=True, kw_only=True):
    """Holds the state of its stage, which was lost, as of after `step`; and what that step gave."""

    generation: int
    step: int
    loss: float | None = None
    metrics: dict[str, float] = {}
    norm_squared: float | None = None


class ReplayFailed(_Message, frozen=True):
    """Something that the replay needs cannot be read."""

    generation: int
    why: str


class SaveWanted(_Message, frozen=True):
    """A checkpoint is due. Said by the reporter."""

    generation: int


class Saved(_Message, frozen=True, kw_only=True):
    """What became of this stage's part of a checkpoint."""

    step: int
    stall_s: float = 0.0
    durable_s: float = 0.0
    size_bytes: int = 0
    why_not: str | None = None
    """None: it is on disk."""


class Failed(_Message, frozen=True):
    """The user's code raised."""

    traceback: str
    where: str


class Finished(_Message, frozen=True):
    """All steps are done. The process may live on for what the script does after training."""


class Heartbeat(_Message, frozen=True):
    pass


class Rejoin(_Message, frozen=True, kw_only=True):
    """Instead of Hello, to a coordinator in the place of one that went away: what this worker has
    said and heard, in short."""

    hello: Hello
    replica: int
    stage: int
    job: JobFacts | None = None
    """None until it was ready."""

    generation: int = 0
    """The newest it was told to train in; 0 for none yet."""

    members: tuple[Member, ...] = ()
    """Of that generation, itself included."""

    redo: RollBack | None = None
    """What it was told to take again when that generation began."""

    watermark: int = -1
    finished_step: int | None = None
    report: StepDone | None = None
    """Of the finished step, when it is known."""

    is_copying: bool = False
    """It was told to copy a peer's state, and has not yet done so."""

    operations: int = 0
    """Of its Halted."""

    ending: str | None = None
    """Why that generation cannot go on: a Halt or a Boundary that it has heard, or what it found
    broken."""

    is_halted: bool = False
    has_finished: bool = False
    replanned_from: int | None = None
    """The step from which it runs another plan than that generation began with."""

    is_measuring: bool = False
    """It owes a Profile."""

    profile: StageProfile | None = None
    """The last it gave."""

    saved: int | None = None
    """Of its Ready."""

    restore: int | None = None
    """The checkpoint that it was told to begin that generation with."""

    durable: int = -1
    """The newest checkpoint that it has heard to be whole on disk."""

    logged: tuple[LogRun, ...] = ()
    is_operating: bool = False
    """Of its Halted."""

    @property
    def uid(self) -> str:
        return self.hello.uid

    @property
    def place(self) -> WorkerId:
        return WorkerId(self.replica, self.stage)


class WorkerExited(_Message, frozen=True, kw_only=True):
    uid: str
    number: int
    pid: int
    code: int
    """As of `subprocess`: minus the signal's number when a signal ended it."""


class AgentHello(_Message, frozen=True, kw_only=True):
    uid: str
    host: str
    workers: int
    """How many it offers to run."""

    seats: tuple[Seat, ...] = ()
    """All it was given by the coordinator that was here before; none for a new agent."""

    running: tuple[int, ...] = ()
    """The numbers among them that it runs, or is about to start."""

    ended: tuple[WorkerExited, ...] = ()
    """The workers it ran that have ended, whether the last coordinator heard of it or not."""

    def empty_seats(self) -> list[int]:
        return [seat.number for seat in self.seats if seat.number not in self.running]

    def without(self, exited: WorkerExited) -> AgentHello:
        """As it would be said after that worker ended."""
        running = tuple(number for number in self.running if number != exited.number)
        return msgspec.structs.replace(self, running=running, ended=(*self.ended, exited))


class Welcome(_Message, frozen=True, kw_only=True):
    replica: int
    stage: int
    replicas: int
    stages: int
    is_beginning: bool = True
    """Nobody trains yet: a checkpoint may be what all begin with."""


class Resume(_Message, frozen=True, kw_only=True):
    """Train in `generation`."""

    generation: int
    step: int
    """The next to run."""

    watermark: int
    """What everybody has finished. `step - 1`, or one less while some still copy that state."""

    actions: tuple[ActionRow, ...]
    members: tuple[Member, ...]
    meeting: Meeting
    profile_steps: int = 0
    """Measure so many more steps, then send a Profile; 0 when none is wanted."""

    redo: RollBack | None = None
    """To be done first, even when this generation has already been halted again."""

    undo: bool = False
    """Take the last finished step back first; likewise."""

    copies: tuple[Copy, ...] = ()
    operations: int = 0
    """Completed by everybody: later ones must be served again."""

    result: StepResult | None = None
    """Of step `step - 1`, for those who get its state by copy."""

    boundary: int | None = None
    """The generation ends after this step, as by Boundary; `step - 1`: before it runs any."""

    restore: int | None = None
    """Load the checkpoint of this step first, likewise even when this generation is over."""

    replays: tuple[Replay, ...] = ()
    """To be done by all who take part, one after the other, before the first step."""

    durable: int = -1
    """The step of the newest checkpoint that is whole on disk."""

    unlogged: tuple[int, ...] = ()
    """Boundaries that need not be logged."""


class Replan(_Message, frozen=True, kw_only=True):
    """From `from_step` on, run these actions instead."""

    generation: int
    from_step: int
    actions: tuple[ActionRow, ...]


class Watermark(_Message, frozen=True):
    """Every live worker finished `step`."""

    generation: int
    step: int


class Boundary(_Message, frozen=True):
    """Halt by yourself when `after_step` is finished: a new worker joins there."""

    generation: int
    after_step: int


class Save(_Message, frozen=True):
    """Take a checkpoint of what you hold when everybody has finished `step`."""

    generation: int
    step: int


class SaveFailed(_Message, frozen=True):
    """Some stage could not save `step`: the others' parts of it are of no use."""

    step: int


class Durable(_Message, frozen=True):
    """The checkpoint of `step` is whole on disk: logs of steps up to it are of no use any more."""

    step: int


class LogLess(_Message, frozen=True):
    """Boundaries that need not be logged any more: their stages are replayed together."""

    boundaries: tuple[int, ...]


class Halt(_Message, frozen=True):
    generation: int
    why: str


class Stop(_Message, frozen=True):
    """The job is over. To workers and to agents; to workers also when all are started again."""

    why: str
    exit_code: int


class Spawn(_Message, frozen=True):
    seats: tuple[Seat, ...]


FromWorker: TypeAlias = (
    Hello
    | Ready
    | StepDone
    | Profile
    | Halted
    | Broken
    | Resumed
    | Copied
    | Replayed
    | ReplayFailed
    | SaveWanted
    | Saved
    | Failed
    | Finished
    | Heartbeat
    | Rejoin
)

FromAgent: TypeAlias = AgentHello | WorkerExited | Heartbeat

ToWorker: TypeAlias = (
    Welcome
    | Resume
    | Replan
    | Watermark
    | Boundary
    | Save
    | SaveFailed
    | Durable
    | LogLess
    | Halt
    | Stop
)

ToAgent: TypeAlias = Spawn | Stop

Message: TypeAlias = FromWorker | FromAgent | ToWorker | ToAgent
