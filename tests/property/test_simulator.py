"""What a simulation must keep, for any job and any trace."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everstep.checkpoint import baselines, failure_rate, objectives
from everstep.checkpoint.policy import Costs, Policy, Situation
from everstep.checkpoint.progress import Progress
from everstep.core.ids import WorkerId
from everstep.membership.facts import LogFacts, StageProfile
from everstep.membership.rebuilding import LogRequest
from everstep.membership.recovering import Recovery, Survivor
from everstep.membership.roster import Shape
from everstep.recovery import decide
from everstep.recovery.rebuild import choose_logs
from everstep.schedule import normalize
from everstep.schedule.planner import plan
from everstep.schedule.problem import Variant
from everstep.sim import periods
from everstep.sim import saving as sim_saving
from everstep.sim.account import Account
from everstep.sim.job import Job, Layer, cuts
from everstep.sim.logs import Groups
from everstep.sim.loop import run
from everstep.sim.periods import Periods, one_f_one_b_s, places
from everstep.sim.setting import Failures, Setting
from everstep.sim.systems import everstep as everstep_system
from everstep.sim.systems.ideal import Ideal
from everstep.sim.systems.registry import SYSTEMS
from everstep.sim.trace import Trace, make_trace

REAL = [name for name in SYSTEMS if name != "ideal"]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    times = st.sampled_from([0.5, 1.0, 1.5])
    stages = draw(st.integers(1, 4))
    layers = tuple(
        Layer(
            forward=draw(times),
            input_gradient=draw(times),
            weight_gradient=draw(times),
            state_bytes=1e9,
            gradient_bytes=0.0,
            activation_bytes=1e8,
        )
        for _ in range(draw(st.integers(stages, 2 * stages)))
    )
    return Job(
        name="drawn",
        replicas=draw(st.integers(1, 4)),
        stages=stages,
        microbatches=draw(st.integers(1, 6)),
        layers=layers,
        boundary_bytes=0.0,
        optimizer_s=0.0,
    )


@st.composite
def traces(draw: st.DrawFn, num_nodes: int) -> Trace:
    row = st.tuples(st.floats(0, 9e4), st.integers(0, num_nodes - 1), st.booleans())
    rows = draw(st.lists(row, max_size=16))
    return make_trace(rows, name="drawn", num_nodes=num_nodes, duration_s=1e5)


def setting_for(job: Job, trace: Trace, *, log_groups: int = 0) -> Setting:
    return Setting(
        job=job,
        failures=Failures.of(trace),
        num_nodes=trace.num_nodes,
        log_groups=log_groups,
    )


def simulated(name: str, job: Job, trace: Trace, *, log_groups: int = 0) -> Account:
    setting = setting_for(job, trace, log_groups=log_groups)
    return run(SYSTEMS[name](setting), trace, setting)


@pytest.mark.parametrize("name", SYSTEMS)
@given(job=jobs())
def test_without_failures_every_system_has_its_fault_free_throughput(name: str, job: Job) -> None:
    trace = make_trace([], name="none", num_nodes=job.num_workers, duration_s=1e5)
    setting = setting_for(job, trace)
    system = SYSTEMS[name](setting)
    account = run(system, trace, setting)
    stall_s = sum(account.down_s.values())
    assert account.steps * system.fault_free_step_s == pytest.approx(1e5 - stall_s)
    assert stall_s <= 0.035 * 1e5  # what CheckFreq allows itself; the others need far less
    assert account.steps_lost == 0


@given(st.data())
def test_more_failures_never_help_the_ideal(data: st.DataObject) -> None:
    job = data.draw(jobs())
    outages = st.lists(
        st.tuples(st.integers(0, job.num_workers - 1), st.floats(0, 9e4), st.floats(1, 9e4)),
        max_size=8,
    )
    few, more = data.draw(outages), data.draw(outages)
    assert _ideal_steps(job, [*few, *more]) <= _ideal_steps(job, few) + 1e-6


def _ideal_steps(job: Job, outages: list[tuple[int, float, float]]) -> float:
    """Outages of one node may overlap: it is down in their union."""
    rows = []
    for node in range(job.num_workers):
        until = -1.0
        for start, length in sorted((s, d) for n, s, d in outages if n == node):
            if start > until:
                rows.append((start, node, True))
            elif start + length > until:
                rows.remove((until, node, False))
            else:
                continue
            until = start + length
            rows.append((until, node, False))
    trace = make_trace(rows, name="drawn", num_nodes=job.num_workers, duration_s=1e5)
    setting = setting_for(job, trace)
    return run(Ideal(setting), trace, setting).steps


@pytest.mark.parametrize("name", SYSTEMS)
@given(data=st.data())
def test_no_system_does_more_than_its_live_workers_could_without_bubbles(
    name: str, data: st.DataObject
) -> None:
    """The ideal times what the bubbles of a fault-free step would allow: all of them filled."""
    job = data.draw(jobs())
    trace = data.draw(traces(job.num_workers))
    account = simulated(name, job, trace)
    work_s = job.batch_microbatches * sum(layer.total for layer in job.layers)
    assert account.steps <= trace.up_node_seconds() / work_s + 1e-6


@pytest.mark.parametrize("name", SYSTEMS)
@given(data=st.data())
def test_all_time_is_accounted_for(name: str, data: st.DataObject) -> None:
    job = data.draw(jobs())
    trace = data.draw(traces(job.num_workers))
    log_groups = data.draw(st.integers(0, job.stages))
    account = simulated(name, job, trace, log_groups=log_groups)
    assert account.now_s == trace.duration_s
    assert all(seconds >= -1e-6 for seconds in account.down_s.values())
    assert -1e-6 <= account.useful_s <= trace.duration_s
    assert account.steps >= -1e-9
    assert account.curve_s == sorted(account.curve_s)


@pytest.mark.parametrize("name", SYSTEMS)
@given(data=st.data())
def test_the_same_trace_gives_the_same_account(name: str, data: st.DataObject) -> None:
    job = data.draw(jobs())
    trace = data.draw(traces(job.num_workers))
    assert simulated(name, job, trace) == simulated(name, job, trace)


def test_live_and_simulated_decisions_are_the_same_objects() -> None:
    from everstep.checkpoint import judgement, saver
    from everstep.checkpoint import run_record as live_record
    from everstep.training import coordinating
    from everstep.training import saving as live_saving

    for module in (everstep_system, coordinating):
        assert vars(module)["decide_recovery"] is decide.decide_recovery
        assert vars(module)["decide_normalization"] is normalize.decide_normalization
    assert vars(periods)["plan"] is vars(coordinating)["plan"] is plan
    for module in (everstep_system, judgement):
        assert vars(module)["LostProgress"] is objectives.LostProgress
    for module in (live_saving, saver):
        assert vars(module)["Judgement"] is judgement.Judgement
    for module in (sim_saving, live_record):
        assert vars(module)["FailureRate"] is failure_rate.FailureRate
    assert {type(policy) for policy in sim_saving.POLICIES.values()} == {
        objectives.LostProgress,
        baselines.YoungDaly,
        baselines.CheckFreq,
    }


@given(data=st.data())
def test_a_simulated_job_saves_after_the_steps_at_which_a_live_one_would(
    data: st.DataObject,
) -> None:
    """The live policy is asked after every step, as the live system fills its situation; the
    simulator finds the same number of checkpoints in one go. Only `LostProgress` waits for the
    disk; for the others it is quick enough here, as a live engine would skip what comes too soon.
    """
    policy = data.draw(
        st.sampled_from([*sim_saving.POLICIES.values(), baselines.EverySteps(7)]), label="policy"
    )
    durable_steps = [0.0, 0.5, 2.5] if isinstance(policy, objectives.LostProgress) else [0.0, 0.5]
    step_s = data.draw(st.sampled_from([0.5, 1.0, 4.0]), label="step")
    costs = Costs(
        step_s=step_s,
        stall_s=data.draw(st.sampled_from([0.0, 0.001, 0.01]), label="stall") * step_s,
        durable_s=data.draw(st.sampled_from(durable_steps), label="durable") * step_s,
    )
    rate = data.draw(st.sampled_from([0.0, 1e-6, 1e-4, 1e-2]), label="rate") / step_s
    num_steps = data.draw(st.integers(1, 400), label="steps")
    account = Account(samples_per_step=1)
    sim_saving.start_saving(account, policy, costs, failure_rate=rate, num_workers=4)
    account.run_at(step_s)
    marks = _live_marks(policy, costs, rate=rate, num_steps=num_steps)
    # The last checkpoint is counted when its stall is over, so a hair before the next step ends.
    account.advance((num_steps + 0.5) * step_s + len(marks) * costs.stall_s)
    assert account.num_saves == len(marks)
    assert marks == [int(account.interval_steps) * (n + 1) for n in range(len(marks))]


def _live_marks(policy: Policy, costs: Costs, *, rate: float, num_steps: int) -> list[int]:
    """Steps after which a live worker saves; its clock is the production `Progress`."""
    clock_s = [0.0]
    progress = Progress(now_s=lambda: clock_s[0])
    progress.saved_at_s = -costs.stall_s  # as if the job had begun with a checkpoint
    marks = []
    for step in range(1, num_steps + 1):
        clock_s[0] += costs.step_s + (costs.stall_s if progress.saved_step == step - 1 > 0 else 0.0)
        progress.step_done()
        situation = Situation(
            step=step,
            steps_since=step - progress.saved_step,
            seconds=progress.seconds,
            seconds_since=progress.seconds - progress.saved_at_s,
            costs=costs,
            failure_rate=rate,
            workers=4,
            spent_s=progress.spent_s,
            num_taken=progress.num_taken,
        )
        if policy.is_due(situation):
            marks.append(step)
            progress.saving(step)
            progress.note({"event": "checkpoint", "stall_seconds": costs.stall_s})
    return marks


@given(st.data())
def test_one_survivor_of_a_stage_stands_for_all(data: st.DataObject) -> None:
    """The simulator asks the live decision with one of each stage's workers, which finish together
    and so are alike to it."""
    shape = Shape(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)))
    is_done = data.draw(st.lists(st.booleans(), min_size=shape.stages, max_size=shape.stages))
    live = data.draw(
        st.lists(st.integers(0, shape.replicas), min_size=shape.stages, max_size=shape.stages)
    )

    def decided(counts: list[int]) -> object:
        survivors = [
            Survivor(place=WorkerId(replica, stage), finished_step=7 if is_done[stage] else 6)
            for stage, number in enumerate(counts)
            for replica in range(number)
        ]
        found = decide.decide_recovery(survivors, shape=shape, open_step=7)
        if not isinstance(found, Recovery):
            return type(found), found.stage
        return found.finished_step, found.rungs, len(found.copies), bool(found.undo)

    assert decided(live) == decided([min(number, 1) for number in live])


@given(st.data())
def test_when_losses_cannot_lie_better_the_live_decision_is_to_stay(data: st.DataObject) -> None:
    job = data.draw(jobs())
    losses = tuple(data.draw(st.integers(0, min(job.replicas - 1, 2))) for _ in range(job.stages))
    trace = make_trace([], name="none", num_nodes=job.num_workers, duration_s=1e5)
    system = everstep_system.everstep(setting_for(job, trace))
    system._grid.losses = list(losses)
    problem = replace(system.periods.problem, lost=places(losses))
    best = normalize.best_distribution(problem)
    assert system.can_lie_better() == (system.periods.bound(best) < system.periods.bound(losses))
    if not system.can_lie_better():
        decision = normalize.decide_normalization(problem, copy=0.0, horizon=math.inf)
        assert isinstance(decision, normalize.Stay)


@given(st.data())
def test_a_bound_in_place_of_a_plan_is_close_to_it(data: st.DataObject) -> None:
    """Where memory allows: only rounding and the seams between stages are left."""
    job = replace(data.draw(jobs()), microbatches=8)
    assume(job.replicas > 1)
    losses = tuple(data.draw(st.integers(0, 1)) for _ in range(job.stages))
    known = Periods(job.problem())
    assert known.bound(losses) <= known.period(losses) * (1 + 1e-9)
    assert known.period(losses) <= known.bound(losses) * 1.25


@given(st.data())
def test_periods_are_those_of_the_live_planner(data: st.DataObject) -> None:
    job = data.draw(jobs())
    losses = tuple(data.draw(st.integers(0, min(job.replicas - 1, 2))) for _ in range(job.stages))
    variant = data.draw(st.sampled_from([Variant.DECOUPLED_STAGGERED, Variant.GLUED_SYNC]))
    assume(any(losses))
    problem = job.problem(variant)
    made = plan(replace(problem, lost=places(losses)))
    known = Periods(problem)
    assert known.filling_s(losses) == pytest.approx(made.makespan - made.period)
    assert known.period(losses) == made.period
    assert known.bound(losses) == pytest.approx(made.lower_bound)
    assert one_f_one_b_s(job.durations(), job.microbatches) == made.baselines.one_f_one_b


@given(st.data())
def test_cuts_make_the_heaviest_slice_lightest(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    number = data.draw(st.integers(1, len(costs)))
    ends = cuts([float(cost) for cost in costs], number)
    assert len(ends) == number
    assert ends[-1] == len(costs)
    slices = [costs[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert all(slices)
    assert max(map(sum, slices)) == _lightest(costs, number)


def _lightest(costs: list[int], number: int) -> int:
    if number == 1:
        return sum(costs)
    return min(
        max(sum(costs[:first]), _lightest(costs[first:], number - 1))
        for first in range(1, len(costs) - number + 2)
    )


@given(jobs(), st.data())
def test_the_groups_of_logs_are_the_live_choice(job: Job, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, job.stages))
    stages = tuple(
        StageProfile(
            forward=stage.forward,
            input_gradient=stage.input_gradient,
            weight_gradient=stage.weight_gradient,
            transfer=0.0,
            reduction=0.0,
            optimizer=job.durations().optimizer,
            sent_forward=1,
        )
        for stage in job.durations().stages
    )
    choice = choose_logs(
        LogRequest(
            stages=stages,
            num_microbatches=job.batch_microbatches,
            num_workers=job.num_workers,
            interval_steps=1,
            log=LogFacts(budget_bytes=number - 1),
        )
    )
    boundaries = {end - 1 for end in Groups.of(job, number).ends[:-1]}
    assert boundaries == set(range(job.stages - 1)) - set(choice.unlogged)
