"""One worker as the protocol describes it: what a correct one may do, in which order.

It trains nothing: its state is the list of updates it has applied. Whatever it is told it checks,
so that a wrong order of the coordinator fails at the worker that gets it. Nothing moves but by
`act` and `take`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from crew_log import CrewLog, check_sources
from everstep.core.ids import WorkerId
from everstep.membership import messages as m
from everstep.membership.action_rows import unpack_actions
from everstep.membership.facts import JobFacts, Replay, StageProfile

PROFILE = StageProfile(
    forward=0.25, input_gradient=0.25, weight_gradient=0.25, transfer=0, reduction=0, optimizer=0
)


@dataclass(frozen=True, slots=True)
class Applied:
    """An update: which step, and in which generation its gradients were reduced."""

    step: int
    generation: int
    is_scaled: bool = False


@dataclass(frozen=True, slots=True)
class StageState:
    applied: tuple[Applied, ...] = ()
    undone: tuple[Applied, ...] = ()
    """Taking a step back leaves rounding errors: the state is not bit for bit what it was."""

    @property
    def finished(self) -> int:
        return len(self.applied) - 1


@dataclass(frozen=True, slots=True)
class Held:
    """What a state copy carries."""

    state: StageState
    gradients: Applied | None
    """Of the last update, from which it can be taken back."""


@dataclass(slots=True)
class Wire:
    """What workers have sent to each other. It stays there when the sender dies."""

    began: defaultdict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """By generation and step: who ran its F and B."""

    reduced: defaultdict[tuple[int, int], set[str]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """Whose gradients are in the reduction."""

    copies: dict[tuple[int, str], Held] = field(default_factory=dict)
    """By generation and the uid of the target."""

    logs: dict[tuple[int, str], CrewLog] = field(default_factory=dict)
    """By generation and uid: what those who take part in a replay can give."""

    num_damaged: int = 0
    """So many replays will find something that they cannot read."""

    disk: defaultdict[tuple[int, int], dict[int, StageState]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By step and generation: the parts of a checkpoint, by stage."""

    def newest_whole(self, num_stages: int) -> int | None:
        whole = (step for (step, _), parts in self.disk.items() if len(parts) == num_stages)
        return max(whole, default=None)

    def part(self, step: int, stage: int, num_stages: int) -> StageState:
        return next(
            parts[stage]
            for (of_step, _), parts in self.disk.items()
            if of_step == step and len(parts) == num_stages
        )


class Phase(StrEnum):
    NEW = "new"
    WAITING = "waiting"
    """For Welcome or Resume."""

    CONNECTING = "connecting"
    RUNNING = "running"
    OVER = "over"
    """Did all steps; its script may still run."""

    STOPPED = "stopped"
    GONE = "gone"


class Move(StrEnum):
    HELLO = "say Hello"
    CONNECT = "connect and copy"
    STEP = "finish a step"
    HALT = "halt"
    FINISH = "say Finished"
    LEAVE = "leave"


class Gone(StrEnum):
    """The last thing on a connection."""

    CLOSED = "closed"


@dataclass(slots=True)
class CrewWorker:
    uid: str
    number: int
    job: JobFacts = field(repr=False)
    norm_of: Callable[[int], float] = field(repr=False)
    """The whole gradient's norm at a step; clipping is 1."""

    wire: Wire = field(repr=False)
    up: deque[m.FromWorker | Gone] = field(default_factory=deque)
    down: deque[m.ToWorker] = field(default_factory=deque)
    phase: Phase = Phase.NEW
    place: m.Welcome | None = None
    resume: m.Resume | None = field(default=None, repr=False)
    generation: int = 0
    state: StageState | None = None
    gradients: Applied | None = None
    watermark: int = -1
    boundary: int | None = None
    is_told_to_halt: bool = False
    is_broken: bool = False
    is_frozen: bool = False
    has_finished: bool = False
    profile_steps_left: int = 0
    replan: m.Replan | None = None
    save_step: int | None = None
    stop: m.Stop | None = None
    log: CrewLog = field(init=False, repr=False)
    failed_replay: int = 0
    """The generation in which it could not read what it needed."""

    def __post_init__(self) -> None:
        self.log = CrewLog(self.job.microbatches)

    @property
    def finished(self) -> int | None:
        return None if self.state is None else self.state.finished

    @property
    def redone(self) -> list[int]:
        applied = () if self.state is None else self.state.applied
        return [update.step for update in applied if update.is_scaled]

    @property
    def is_alive(self) -> bool:
        return self.phase is not Phase.GONE

    @property
    def is_awake(self) -> bool:
        return self.is_alive and not self.is_frozen

    @property
    def has_joined(self) -> bool:
        """Its Hello is on its way."""
        return self.phase is not Phase.NEW

    @property
    def is_in_generation(self) -> bool:
        return self.phase in (Phase.CONNECTING, Phase.RUNNING, Phase.OVER)

    def moves(self) -> list[Move]:
        """What it can do next by itself."""
        if not self.is_awake:
            return []
        able = {
            Move.HELLO: self.phase is Phase.NEW,
            Move.CONNECT: self._can_connect(),
            Move.STEP: self._can_step(),
            Move.FINISH: self._can_finish(),
            Move.HALT: self._can_halt(),
            # Whoever has finished may be in no mood to halt.
            Move.LEAVE: self.phase in (Phase.OVER, Phase.STOPPED),
        }
        return [move for move, is_able in able.items() if is_able]

    def act(self, move: Move) -> None:
        assert move in self.moves()
        match move:
            case Move.HELLO:
                self.phase = Phase.WAITING
                self.up.append(
                    m.Hello(uid=self.uid, number=self.number, pid=1, host="h", data_address="a:1")
                )
            case Move.CONNECT:
                self._connect()
            case Move.STEP:
                self._step()
            case Move.HALT:
                self.phase = Phase.WAITING
                self.is_told_to_halt = self.is_broken = False
                logged = () if self.job.log is None else self.log.runs()
                self.up.append(m.Halted(self.generation, self.finished, logged=logged))
            case Move.FINISH:
                self._finish()
            case Move.LEAVE:
                self.phase = Phase.GONE
                self.up.append(Gone.CLOSED)

    def die(self, *, num_unsent: int = 0) -> None:
        """The last messages are lost with it, but a Hello that was said is heard."""
        for _ in range(num_unsent):
            if self.up and not isinstance(self.up[-1], m.Hello):
                self.up.pop()
        if self.has_joined:
            self.up.append(Gone.CLOSED)
        self.phase = Phase.GONE

    def report_broken(self) -> None:
        """It cannot reach a peer; it does nothing more until it is told to halt."""
        self.is_broken = True
        self.up.append(m.Broken(self.generation, "a channel broke"))

    def take(self) -> m.ToWorker:
        """Reads one message and answers what must be answered."""
        message = self.down.popleft()
        of_no_generation = m.Welcome | m.Stop | m.Resume | m.SaveFailed | m.Durable | m.LogLess
        if not isinstance(message, of_no_generation):
            assert message.generation == self.generation
        match message:
            case m.Welcome():
                self.place = message
                self.up.append(m.Ready(self.job, self._newest_whole(message)))
            case m.Resume():
                self._resume(message)
            case m.Replan():
                # Step `finished + 1` may be running already.
                assert self.finished is not None
                assert message.from_step > self.finished + 1
                self.replan = message
            case m.Watermark():
                assert message.step == self.watermark + 1
                self.watermark = message.step
                self._save_when_asked()
                self._go_on()
            case m.Boundary():
                assert self.finished is None or message.after_step > self.finished
                self.boundary = message.after_step
            case m.Save() | m.SaveFailed() | m.Durable() | m.LogLess():
                self._hear_of_saves(message)
            case m.Halt():
                self.is_told_to_halt = self.is_in_generation
            case m.Stop():
                self.stop = message
                self.phase = Phase.STOPPED
        return message

    def _hear_of_saves(self, message: m.Save | m.SaveFailed | m.Durable | m.LogLess) -> None:
        if isinstance(message, m.Save):
            assert message.step > self.watermark
            self.save_step = message.step
        if isinstance(message, m.Durable):
            self.log.collect(message.step)

    def _newest_whole(self, welcome: m.Welcome) -> int | None:
        is_of_use = self.job.is_saved and welcome.is_beginning
        return self.wire.newest_whole(welcome.stages) if is_of_use else None

    # A generation begins.

    def _resume(self, resume: m.Resume) -> None:
        assert self.phase is Phase.WAITING
        assert resume.generation == self.generation + 1 or self.generation == 0
        assert self.uid in {member.uid for member in resume.members}
        assert resume.watermark in (resume.step - 1, resume.step - 2)
        self.resume = resume
        self.generation = resume.generation
        self._adjust(resume)
        assert resume.watermark >= self.watermark
        self.watermark = resume.watermark
        self.profile_steps_left = resume.profile_steps
        self.boundary = resume.boundary
        self.replan = self.save_step = None
        self.phase = Phase.CONNECTING

    def _adjust(self, resume: m.Resume) -> None:
        """What is done even when the generation is over again already."""
        is_target = self._is_target(resume) or self._my_replay(resume) is not None
        if resume.restore is not None:
            assert self.place is not None
            assert self.state is None
            assert not is_target
            self.state = self.wire.part(resume.restore, self.place.stage, self.place.stages)
            assert self.finished == resume.restore == resume.step - 1
            return
        if self.state is None:
            assert is_target or resume.step == 0
            self.state = None if is_target else StageState()
            return
        assert self._my_replay(resume) is None, "told to rebuild a state that it has"
        assert not (resume.undo and is_target), "told both to take a step back and to copy"
        assert not (resume.undo and resume.redo)
        if resume.redo is not None:
            assert resume.redo.step == self.finished
            assert 0 < resume.redo.scale < 1
            self._redo()
        if resume.undo:
            self._undo()
        if is_target:
            self._check_result(resume)
        else:
            assert resume.step - 1 == self.finished

    def _save_when_asked(self) -> None:
        """The first worker of a stage saves it, as it is when everybody has the step."""
        if self.save_step != self.watermark:
            return
        assert self.resume is not None
        assert self.state is not None
        assert self.finished == self.save_step
        stage, replica = self._seat
        if replica == min(peer.replica for peer in self.resume.members if peer.stage == stage):
            self.wire.disk[self.save_step, self.generation][stage] = self.state
            self.up.append(m.Saved(step=self.save_step, size_bytes=1))

    def _redo(self) -> None:
        last = self._last_with_gradients()
        assert self.state is not None
        assert not last.is_scaled, f"step {last.step} was scaled already"
        self.gradients = replace(last, is_scaled=True)
        self.log.scaled.add(last.step)
        self.state = replace(self.state, applied=(*self.state.applied[:-1], self.gradients))

    def _undo(self) -> None:
        last = self._last_with_gradients()
        assert self.state is not None
        assert last.step > self.watermark, "everybody was said to have finished it"
        self.state = StageState(self.state.applied[:-1], (*self.state.undone, last))
        self.gradients = None

    def _last_with_gradients(self) -> Applied:
        assert self.state is not None
        assert self.state.applied
        assert self.gradients == self.state.applied[-1], "its gradients have been overwritten"
        return self.gradients

    def _check_result(self, resume: m.Resume) -> None:
        """Its user is given the step that it gets by copy."""
        assert self.finished is not None
        if self.finished < resume.step - 1:
            assert resume.result is not None
            assert resume.result.loss == 100.0 + resume.step - 1

    def _is_target(self, resume: m.Resume) -> bool:
        return any((copy.stage, copy.target) == self._seat for copy in resume.copies)

    @property
    def _seat(self) -> tuple[int, int]:
        assert self.place is not None
        return self.place.stage, self.place.replica

    def _my_replay(self, resume: m.Resume) -> Replay | None:
        mine = (replay for replay in resume.replays if self._worker_id in replay.rebuilt)
        return next(mine, None)

    @property
    def _worker_id(self) -> WorkerId:
        stage, replica = self._seat
        return WorkerId(replica, stage)

    def _can_connect(self) -> bool:
        if self.phase is not Phase.CONNECTING:
            return False
        assert self.resume is not None
        if self._my_replay(self.resume) is not None:
            return self._has_all_logs(self.resume) and self.failed_replay < self.generation
        return not self._is_target(self.resume) or (self.generation, self.uid) in self.wire.copies

    def _has_all_logs(self, resume: m.Resume) -> bool:
        """Of those who have a state; they are there first."""
        rebuilt = {place for replay in resume.replays for place in replay.rebuilt}
        return all(
            (self.generation, member.uid) in self.wire.logs
            for member in resume.members
            if (member.replica, member.stage) not in rebuilt
        )

    def _take_part(self, resume: m.Resume) -> None:
        """Gives what it has logged, and runs its share of each replay."""
        self.wire.logs[self.generation, self.uid] = self.log
        for replay in resume.replays:
            if self._worker_id in replay.rebuilt:
                self._rebuild(resume, replay)
            elif self._worker_id in replay.replayers:
                assert self.finished == resume.step - 1, "a helper keeps its own state"
            if self._worker_id in replay.replayers:
                self._log_again(replay)

    def _log_again(self, replay: Replay) -> None:
        assert self.place is not None
        num_microbatches = self.place.replicas * self.job.microbatches
        share = range(num_microbatches)
        if replay.is_shared:
            first = replay.replayers.index(self._worker_id)
            assert first < num_microbatches, "there is nothing to share with it"
            share = range(first, num_microbatches, len(replay.replayers))
        self.log.sends_again(replay, share, attempt=self.generation)

    def _rebuild(self, resume: m.Resume, replay: Replay) -> None:
        """The steps after the checkpoint, from what the others have logged."""
        assert self.place is not None
        assert self.state is None
        assert replay.last_step == resume.step - 1
        logs = {
            WorkerId(member.replica, member.stage): self.wire.logs[self.generation, member.uid]
            for member in resume.members
            if (self.generation, member.uid) in self.wire.logs
        }
        num_microbatches = self.place.replicas * self.job.microbatches
        stages = self.place.stages
        check_sources(replay, logs, num_stages=stages, num_microbatches=num_microbatches)
        state = StageState()
        if replay.checkpoint >= 0:
            state = self.wire.part(replay.checkpoint, self.place.stage, stages)
        scaled = logs[replay.scales_from].scaled
        self.log.scaled |= scaled
        for step in range(replay.checkpoint + 1, replay.last_step + 1):
            # In which generation it ran first is not known to those who run it again.
            self.gradients = Applied(step, -1, is_scaled=step in scaled)
            state = replace(state, applied=(*state.applied, self.gradients))
        self.state = state
        is_last = self.place.stage + 1 == stages
        self.up.append(
            m.Replayed(
                generation=self.generation,
                step=replay.last_step,
                loss=100.0 + replay.last_step if is_last else None,
                norm_squared=self.norm_of(replay.last_step) ** 2 / stages,
            )
        )

    def _connect(self) -> None:
        assert self.resume is not None
        if self._my_replay(self.resume) is not None and self.wire.num_damaged:
            self.wire.num_damaged -= 1
            self.failed_replay = self.generation
            self.up.append(m.ReplayFailed(self.generation, "it is damaged"))
            return
        self._take_part(self.resume)
        uid_at = {(member.stage, member.replica): member.uid for member in self.resume.members}
        for copy in self.resume.copies:
            if (copy.stage, copy.source) == self._seat:
                assert self.state is not None
                assert self.state.finished == self.resume.step - 1
                target = uid_at[copy.stage, copy.target]
                self.wire.copies[self.generation, target] = Held(self.state, self.gradients)
            elif (copy.stage, copy.target) == self._seat:
                held = self.wire.copies[self.generation, self.uid]
                self.state, self.gradients = held.state, held.gradients
                self.up.append(m.Copied(self.generation, self.resume.step - 1))
        self.up.append(m.Resumed(self.generation, 0.01, 0.0))
        self.phase = Phase.RUNNING
        if self.has_finished:
            self._finish()
        self._go_on()

    # Steps.

    def _go_on(self) -> None:
        """Runs as much of the next step as it may: F and B, and W after the watermark."""
        if self.phase is not Phase.RUNNING or self.is_told_to_halt or self._is_at_boundary:
            return
        assert self.finished is not None
        step = self.finished + 1
        if step == self.job.steps:
            return
        self.wire.began[self.generation, step].add(self.uid)
        self._send_all(step)
        if self.watermark >= self.finished:
            self.wire.reduced[self.generation, step].add(self.uid)
            self.gradients = None

    def _send_all(self, step: int) -> None:
        assert self.resume is not None
        if self.job.log is None:
            return
        rows = self.resume.actions
        if self.replan is not None and self.replan.from_step <= step:
            rows = self.replan.actions
        actions = unpack_actions(rows, worker=self._worker_id)
        self.log.sends(actions, step=step, attempt=self.generation)

    @property
    def _is_at_boundary(self) -> bool:
        return self.boundary is not None and self.finished == self.boundary

    def _can_step(self) -> bool:
        if self.phase is not Phase.RUNNING or self.is_broken or self._is_at_boundary:
            return False
        assert self.resume is not None
        assert self.finished is not None
        key = (self.generation, self.finished + 1)
        members = self.resume.members
        mine = {member.uid for member in members if member.stage == self._seat[0]}
        everyone = {member.uid for member in members}
        return mine <= self.wire.reduced[key] and everyone <= self.wire.began[key]

    def _step(self) -> None:
        assert self.place is not None
        assert self.state is not None
        step = self.state.finished + 1
        update = Applied(step, self.generation)
        self.state = replace(self.state, applied=(*self.state.applied, update))
        self.gradients = update
        is_last = self.place.stage + 1 == self.place.stages
        self.up.append(
            m.StepDone(
                generation=self.generation,
                step=step,
                seconds=0.1,
                loss=100.0 + step if is_last else None,
                norm_squared=self.norm_of(step) ** 2 / self.place.stages,
            )
        )
        self.profile_steps_left -= 1
        if self.profile_steps_left == 0:
            self.up.append(m.Profile(self.generation, PROFILE))
        self._go_on()

    # The end of a generation, and of all.

    def _can_halt(self) -> bool:
        is_by_plan = self.phase is Phase.RUNNING and self._is_at_boundary
        return is_by_plan or (self.is_in_generation and self.is_told_to_halt)

    def _can_finish(self) -> bool:
        return (
            self.phase is Phase.RUNNING
            and not self.is_told_to_halt
            and not self.is_broken
            and self.finished == self.watermark == self.job.steps - 1
        )

    def _finish(self) -> None:
        self.phase = Phase.OVER
        self.has_finished = True
        self.up.append(m.Finished())
