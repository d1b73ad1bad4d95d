"""The messages between workers, agents and the coordinator, and their bytes.

MessagePack of typed, closed structs: a frame that is too large, has an unknown field or a wrong
type is refused before anything acts on it. Nothing here runs code from the wire. Tokens and the
protocol version are checked at the handshake (see access.py), before the first message.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Generic, TypeAlias, TypeVar

import msgspec

from everstep.core.errors import MessageInvalid
from everstep.core.ids import WorkerId
from everstep.schedule.actions import Action, Kind

VERSION = 5
"""Raised whenever a message changes: both ends of a connection must have the same."""

SUBPROTOCOL = f"everstep.v{VERSION}"
"""The name under which the WebSocket handshake agrees on VERSION."""

MAX_MESSAGE_BYTES = 16 << 20
"""A Resume for 4,096 workers takes under 1 MiB."""

ActionRow: TypeAlias = tuple[Kind, int, int, int | None, int | None]
"""Kind, replica and micro-batch, then the replicas of the peers to receive from and to send to.
The peers' stages follow from the kind: F goes down the pipeline, B up."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


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


# From a worker.


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


# From an agent.


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

Incoming = TypeVar("Incoming")


class Decoder(Generic[Incoming]):
    """Reads the messages that may come from one kind of peer."""

    def __init__(self, messages: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(messages)

    def decode(self, frame: bytes | str) -> Incoming:
        if isinstance(frame, str):
            raise MessageInvalid("it is text, and messages are binary", size_bytes=len(frame))
        _check_size(len(frame))
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise MessageInvalid(str(error), size_bytes=len(frame)) from None


from_worker: Decoder[FromWorker] = Decoder(FromWorker)
from_agent: Decoder[FromAgent] = Decoder(FromAgent)
to_worker: Decoder[ToWorker] = Decoder(ToWorker)
to_agent: Decoder[ToAgent] = Decoder(ToAgent)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    frame = _encoder.encode(message)
    _check_size(len(frame))
    return frame


def _check_size(size_bytes: int) -> None:
    if size_bytes > MAX_MESSAGE_BYTES:
        raise MessageInvalid(f"the limit is {MAX_MESSAGE_BYTES} bytes", size_bytes=size_bytes)


def pack_actions(actions: Iterable[Action]) -> tuple[ActionRow, ...]:
    """A worker's actions as rows. Planned times stay behind: the order is what counts."""
    return tuple(
        (
            action.kind,
            action.replica,
            action.microbatch,
            None if action.receives_from is None else action.receives_from.replica,
            None if action.sends_to is None else action.sends_to.replica,
        )
        for action in actions
    )


def unpack_actions(rows: Iterable[ActionRow], *, worker: WorkerId) -> tuple[Action, ...]:
    return tuple(_unpack(row, worker) for row in rows)


def _unpack(row: ActionRow, worker: WorkerId) -> Action:
    kind, replica, microbatch, receives_from, sends_to = row
    # W has no peers, so its direction is of no matter.
    downstream = 1 if kind is Kind.FORWARD else -1
    return Action(
        kind=kind,
        stage=worker.stage,
        replica=replica,
        microbatch=microbatch,
        worker=worker,
        receives_from=_peer(receives_from, worker.stage - downstream),
        sends_to=_peer(sends_to, worker.stage + downstream),
        start=0.0,
        end=0.0,
    )


def _peer(replica: int | None, stage: int) -> WorkerId | None:
    return None if replica is None else WorkerId(replica, stage)
