"""The one place that knows all concrete classes: builds a worker's run, and a coordinator."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import ExitStack

from everstep.comm.endpoint import Endpoint
from everstep.comm.framing import Direction
from everstep.comm.gloo import form_gloo
from everstep.comm.group import Group, SoloGroup
from everstep.comm.nccl import form_nccl
from everstep.comm.store import StoreAddress
from everstep.core import points
from everstep.core.clock import SystemClock
from everstep.core.errors import ConfigError
from everstep.core.ids import WorkerId
from everstep.execute.links import Links, channels_of
from everstep.launch.context import WorkerContext, current_worker
from everstep.membership import messages as m
from everstep.membership.facts import JobFacts, Meeting
from everstep.schedule.durations import Durations
from everstep.schedule.planner import plan
from everstep.schedule.problem import Problem
from everstep.training.devices import Backend, choose_backend, take_device
from everstep.training.guide import CoordinatorGuide, Guide, SoloGuide
from everstep.training.holding import Holding, hold
from everstep.training.job import Job, digest
from everstep.training.logs import log_facts, rebuilder, stage_log
from everstep.training.orders import Orders
from everstep.training.replay_share import log_channels
from everstep.training.run import Connect, Run
from everstep.training.saving import StageSaver
from everstep.training.stage_tree import StageTree

CONNECT_WITHIN_S = 60.0


def train(job: Job, *, steps: int) -> Run:
    """Trains `job`: iterate over what this returns. The same code on every worker.

    Started by `everstep run` or an agent, this process is one worker of many; started as plain
    `python train.py` it trains alone.
    """
    if steps < 1:
        raise ConfigError("steps", steps, "must be at least 1")
    context = current_worker()
    return _train_alone(job, steps) if context is None else _train_together(job, steps, context)


def _train_alone(job: Job, steps: int) -> Run:
    device = take_device(job, None)
    holding = hold(job, me=WorkerId(0, 0), replicas=1, num_stages=1, device=device)
    problem = Problem(
        replicas=1,
        stages=1,
        microbatches=job.microbatches,
        durations=Durations.uniform(1),
        in_flight=job.in_flight_limits(1),
    )
    saver = _saver(holding, steps)
    restore = None if saver is None else saver.newest_whole()
    guide = SoloGuide(plan(problem).actions[holding.me], restore=restore)
    connect = _Alone(holding.me)
    run = Run(holding, guide, connect, steps=steps, clock=SystemClock(), saver=saver)
    atexit.register(run.close)  # what was saved last is still on its way
    return run


def _train_together(job: Job, steps: int, context: WorkerContext) -> Run:
    endpoint = Endpoint(context.host)
    client = context.connect(data_address=endpoint.address)
    place = client.wait_welcome()
    me = WorkerId(place.replica, place.stage)
    points.stand_at(me)
    device, backend = take_device(job, context), choose_backend(job, context)
    holding = hold(job, me=me, replicas=place.replicas, num_stages=place.stages, device=device)
    guide: Guide = CoordinatorGuide(client, me=me)
    saver = _saver(holding, steps, is_beginning=place.is_beginning)
    saved = saver.newest_whole() if saver is not None and place.is_beginning else None
    client.send(m.Ready(_facts(job, steps, holding, backend), saved))
    log = stage_log(holding)
    run = Run(
        holding,
        guide,
        _Together(holding, endpoint, backend),
        steps=steps,
        clock=SystemClock(),
        saver=saver,
        log=log,
        rebuilder=None if log is None else rebuilder(holding, log),
    )
    context.on_close(run.close)
    return run


def _facts(job: Job, steps: int, holding: Holding, backend: Backend) -> JobFacts:
    return JobFacts(
        microbatches=job.microbatches,
        steps=steps,
        batch_size=job.batch_size,
        seed=job.seed,
        digest=digest(job, holding.stages, backend=backend),
        in_flight=job.in_flight_limits(holding.stage.num_stages),
        clip_norm=job.clip_norm,
        clip_mode=job.clip_mode,
        is_saved=job.checkpoint is not None,
        log=log_facts(job, replicas=holding.replicas),
    )


def _saver(holding: Holding, steps: int, *, is_beginning: bool = True) -> StageSaver | None:
    if holding.job.checkpoint is None:
        return None
    stage, update = holding.stage, holding.update
    return StageSaver(
        holding.job.checkpoint,
        StageTree(stage.module, update.optimizer, update.scheduler),
        part=(stage.index, stage.num_stages),
        total_steps=steps,
        num_workers=holding.replicas * stage.num_stages,
        is_beginning=is_beginning,
    )


class _Alone(Connect):
    def __init__(self, me: WorkerId) -> None:
        self._me = me

    def __call__(self, orders: Orders) -> Links:
        group = SoloGroup(generation=orders.generation, me=self._me)
        return Links(channels=None, stage=group, world=group)


class _Together(Connect):
    """Opens the channels of the plan and of the gathering, and forms the groups."""

    def __init__(self, holding: Holding, endpoint: Endpoint, backend: Backend) -> None:
        self._backend = backend
        self._me = holding.me
        self._num_stages = holding.stage.num_stages
        self._endpoint = endpoint

    def __call__(self, orders: Orders) -> Links:
        meeting = orders.meeting
        assert meeting is not None
        points.passing(points.Point.BEFORE_GROUPS, step=orders.step)
        sends, receives = channels_of(orders.actions)
        leads = [orders.members_of(stage)[0] for stage in range(self._num_stages)]
        reporter = leads[-1]
        if self._me == reporter:
            receives |= {(lead, Direction.ACTIVATION) for lead in leads[:-1]}
        elif self._me in leads:
            sends.add((reporter, Direction.ACTIVATION))
        for copy in orders.copies:
            if copy.source == self._me:
                sends.add((copy.target, Direction.ACTIVATION))
            elif copy.target == self._me:
                receives.add((copy.source, Direction.ACTIVATION))
        log_sends, log_receives = log_channels(orders.replays, self._me)
        with ExitStack() as undo:
            channels = self._endpoint.open(
                generation=orders.generation,
                me=self._me,
                addresses=orders.addresses,
                sends=sends | log_sends,
                receives=receives | log_receives,
                token=meeting.token,
                timeout_s=CONNECT_WITHIN_S,
                lifetime=orders.lifetime,
            )
            undo.callback(channels.close)
            groups: list[Group] = []
            for name, members in self._groups(orders):
                group = self._form(name, members, orders, meeting)
                undo.callback(group.close)
                groups.append(group)
            undo.pop_all()
        points.passing(points.Point.AFTER_GROUPS, step=orders.step)
        stage, world, *replays = groups
        return Links(channels=channels, stage=stage, world=world, replays=tuple(replays))

    def _groups(self, orders: Orders) -> Iterator[tuple[str, tuple[WorkerId, ...]]]:
        yield f"stage{self._me.stage}", orders.members_of(self._me.stage)
        yield "world", orders.members
        for number, replay in enumerate(orders.replays):
            is_mine = replay.is_shared and self._me in replay.replayers
            yield f"replay{number}", replay.replayers if is_mine else (self._me,)

    def _form(
        self, name: str, members: tuple[WorkerId, ...], orders: Orders, meeting: Meeting
    ) -> Group:
        if name.startswith("replay") and len(members) == 1:
            return SoloGroup(generation=orders.generation, me=self._me)
        # What all agree on are single numbers: no business of a device's.
        form = form_nccl if self._backend == "nccl" and name != "world" else form_gloo
        return form(
            store=StoreAddress(host=meeting.host, port=meeting.port),
            generation=orders.generation,
            name=name,
            me=self._me,
            members=members,
            timeout_s=CONNECT_WITHIN_S,
            lifetime=orders.lifetime,
        )
