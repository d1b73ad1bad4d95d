"""The one place that knows all concrete classes: builds a worker's run, and a coordinator."""

from __future__ import annotations

import atexit
from contextlib import ExitStack

import torch
from torch.optim import Optimizer

from everstep.comm.endpoint import Endpoint
from everstep.comm.framing import Direction
from everstep.comm.gloo import form_gloo
from everstep.comm.group import SoloGroup
from everstep.comm.store import StoreAddress
from everstep.core import points
from everstep.core.clock import SystemClock
from everstep.core.errors import ConfigError
from everstep.core.ids import WorkerId
from everstep.execute.data import (
    Fetcher,
    Microbatch,
    SampleOrder,
    Slicing,
    check_dataset,
    fetch,
)
from everstep.execute.links import Links, channels_of
from everstep.execute.split import split_model
from everstep.execute.stage import Stage, data_parts
from everstep.execute.update import Update
from everstep.launch.context import WorkerContext, current_worker
from everstep.membership import messages as m
from everstep.schedule.durations import Durations
from everstep.schedule.planner import plan
from everstep.schedule.problem import Problem
from everstep.training.guide import CoordinatorGuide, Guide, Orders, SoloGuide
from everstep.training.job import Job, check_optimizer, check_shape, digest
from everstep.training.run import Connect, Holding, Run
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
    holding = _hold(job, me=WorkerId(0, 0), replicas=1, num_stages=1)
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
    holding = _hold(job, me=me, replicas=place.replicas, num_stages=place.stages)
    guide: Guide = CoordinatorGuide(client, me=me)
    saver = _saver(holding, steps)
    saved = saver.newest_whole() if saver is not None and place.is_beginning else None
    client.send(m.Ready(_facts(job, steps, holding), saved))
    connect = _Together(holding, endpoint)
    run = Run(holding, guide, connect, steps=steps, clock=SystemClock(), saver=saver)
    context.on_close(run.close)
    return run


def _facts(job: Job, steps: int, holding: Holding) -> m.JobFacts:
    return m.JobFacts(
        microbatches=job.microbatches,
        steps=steps,
        batch_size=job.batch_size,
        seed=job.seed,
        digest=digest(job, holding.stages),
        in_flight=job.in_flight_limits(holding.stage.num_stages),
        clip_norm=job.clip_norm,
        clip_mode=job.clip_mode,
        is_saved=job.checkpoint is not None,
    )


def _saver(holding: Holding, steps: int) -> StageSaver | None:
    if holding.job.checkpoint is None:
        return None
    stage, update = holding.stage, holding.update
    return StageSaver(
        holding.job.checkpoint,
        StageTree(stage.module, update.optimizer, update.scheduler),
        part=(stage.index, stage.num_stages),
        total_steps=steps,
        num_workers=holding.replicas * stage.num_stages,
    )


def _hold(job: Job, *, me: WorkerId, replicas: int, num_stages: int) -> Holding:
    """Builds the model as every worker does, and keeps this worker's stage of it."""
    check_shape(job, replicas=replicas)
    check_dataset(job.dataset)
    order = SampleOrder(
        num_samples=len(job.dataset),
        batch_size=job.batch_size,
        seed=job.seed,
        shuffle=job.shuffle,
    )
    slicing = Slicing(order=order, replicas=replicas, microbatches=job.microbatches)
    torch.manual_seed(job.seed)
    model = job.model()
    example, _ = fetch(job.dataset, slicing.samples(Microbatch(0, 0, 0)), parts=["input"])
    stages = split_model(model, num_stages=num_stages, example=example, split=job.split)
    stage = Stage(
        stages[me.stage],
        index=me.stage,
        num_stages=num_stages,
        loss=job.loss,
        metrics=job.metrics,
        loss_scale=1 / (replicas * job.microbatches),
        precision=job.precision,
        seed=job.seed,
    )
    optimizer = _optimizer(job, stage)
    scheduler = None
    if job.scheduler is not None and optimizer is not None:
        scheduler = job.scheduler(optimizer)
    parts = data_parts(stage)
    return Holding(
        job=job,
        me=me,
        replicas=replicas,
        stage=stage,
        update=Update(stage.buckets, optimizer, scheduler, keep=job.keep),
        fetcher=Fetcher(job.dataset, slicing, parts=parts) if parts else None,
        stages=stages,
    )


def _optimizer(job: Job, stage: Stage) -> Optimizer | None:
    # In the order of the model, as plain PyTorch would give them.
    params = [p for p in stage.module.module.parameters() if p.requires_grad]
    if not params:
        return None
    optimizer = job.optimizer(params)
    check_optimizer(job, optimizer)
    return optimizer


class _Alone(Connect):
    def __init__(self, me: WorkerId) -> None:
        self._me = me

    def __call__(self, orders: Orders) -> Links:
        group = SoloGroup(generation=orders.generation, me=self._me)
        return Links(channels=None, stage=group, world=group)


class _Together(Connect):
    """Opens the channels of the plan and of the gathering, and forms the groups."""

    def __init__(self, holding: Holding, endpoint: Endpoint) -> None:
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
        with ExitStack() as undo:
            channels = self._endpoint.open(
                generation=orders.generation,
                me=self._me,
                addresses=orders.addresses,
                sends=sends,
                receives=receives,
                token=meeting.token,
                timeout_s=CONNECT_WITHIN_S,
                lifetime=orders.lifetime,
            )
            undo.callback(channels.close)
            groups = {}
            for name, members in (
                (f"stage{self._me.stage}", orders.members_of(self._me.stage)),
                ("world", orders.members),
            ):
                groups[name] = form_gloo(
                    store=StoreAddress(host=meeting.host, port=meeting.port),
                    generation=orders.generation,
                    name=name,
                    me=self._me,
                    members=members,
                    timeout_s=CONNECT_WITHIN_S,
                    lifetime=orders.lifetime,
                )
                undo.callback(groups[name].close)
            undo.pop_all()
        points.passing(points.Point.AFTER_GROUPS, step=orders.step)
        stage, world = groups.values()
        return Links(channels=channels, stage=stage, world=world)
