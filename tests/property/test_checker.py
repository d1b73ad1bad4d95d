"""The checker is strict: a valid plan with any one thing changed is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from everstep.core.ids import WorkerId
from everstep.schedule.actions import Action
from everstep.schedule.check import check
from everstep.schedule.plan import Plan
from everstep.schedule.planner import plan
from everstep.schedule.problem import Problem
from problems import problems

Row = tuple[Action, ...]


class Mutant:
    """One position of one worker in a plan, and ways to spoil it."""

    def __init__(self, made: Plan, data: st.DataObject) -> None:
        self.made = made
        self.data = data
        self.worker = data.draw(st.sampled_from(sorted(made.actions)), label="worker")
        self.row = made.actions[self.worker]
        self.at = data.draw(st.integers(0, len(self.row) - 1), label="position")
        self.action = self.row[self.at]

    def with_row(self, row: Row) -> Plan:
        return replace(self.made, actions={**self.made.actions, self.worker: row})

    def with_action(self, action: Action) -> Plan:
        return self.with_row((*self.row[: self.at], action, *self.row[self.at + 1 :]))

    def another_position(self) -> int:
        other = self.data.draw(st.integers(0, len(self.row) - 1), label="other")
        assume(self.row[other].start != self.action.start)
        return other

    def another_worker(self) -> WorkerId:
        others = [worker for worker in sorted(self.made.actions) if worker != self.worker]
        assume(others)
        return self.data.draw(st.sampled_from(others), label="target")


def swap(mutant: Mutant) -> Plan:
    changed = list(mutant.row)
    other = mutant.another_position()
    changed[mutant.at], changed[other] = changed[other], changed[mutant.at]
    return mutant.with_row(tuple(changed))


def swap_kinds_of_one_microbatch(mutant: Mutant) -> Plan:
    """F and B, say, trade places and take each other's times."""
    other = mutant.another_position()
    one, two = mutant.action, mutant.row[other]
    assume((one.replica, one.microbatch) == (two.replica, two.microbatch))
    assume(one.end > one.start and two.end > two.start)
    changed = list(mutant.row)
    changed[mutant.at] = two._replace(start=one.start, end=one.start + two.end - two.start)
    changed[other] = one._replace(start=two.start, end=two.start + one.end - one.start)
    return mutant.with_row(tuple(changed))


def drop(mutant: Mutant) -> Plan:
    return mutant.with_row(mutant.row[: mutant.at] + mutant.row[mutant.at + 1 :])


def repeat(mutant: Mutant) -> Plan:
    return mutant.with_row((*mutant.row[: mutant.at + 1], *mutant.row[mutant.at :]))


def move_to_another_worker(mutant: Mutant) -> Plan:
    target = mutant.another_worker()
    rows = dict(drop(mutant).actions)
    moved = [*rows[target], mutant.action._replace(worker=target)]
    rows[target] = tuple(sorted(moved, key=lambda action: action.start))
    return replace(mutant.made, actions=rows)


def retarget_in_place(mutant: Mutant) -> Plan:
    return mutant.with_action(mutant.action._replace(worker=mutant.another_worker()))


def send_elsewhere(mutant: Mutant) -> Plan:
    sends_to = mutant.action.sends_to
    assume(sends_to is not None)
    assert sends_to is not None
    elsewhere = WorkerId(sends_to.replica + 1, sends_to.stage)
    return mutant.with_action(mutant.action._replace(sends_to=elsewhere))


def receive_from_nobody(mutant: Mutant) -> Plan:
    assume(mutant.action.receives_from is not None)
    return mutant.with_action(mutant.action._replace(receives_from=None))


def start_too_early(mutant: Mutant) -> Plan:
    early = mutant.made.makespan
    action = mutant.action
    return mutant.with_action(action._replace(start=action.start - early, end=action.end - early))


def take_no_time(mutant: Mutant) -> Plan:
    assume(mutant.action.end > mutant.action.start)
    return mutant.with_action(mutant.action._replace(end=mutant.action.start))


def name_another_microbatch(mutant: Mutant) -> Plan:
    return mutant.with_action(mutant.action._replace(microbatch=mutant.action.microbatch + 1))


def claim_a_shorter_period(mutant: Mutant) -> Plan:
    return replace(mutant.made, period=mutant.made.period * 0.9)


def claim_a_higher_bound(mutant: Mutant) -> Plan:
    return replace(mutant.made, lower_bound=mutant.made.period * 1.1)


def use_a_lost_worker(mutant: Mutant) -> Plan:
    assume(mutant.made.problem.lost)
    ghost = min(mutant.made.problem.lost)
    rows = {**mutant.made.actions, ghost: mutant.row}
    return replace(mutant.made, actions=rows)


def turn_a_channel_round(mutant: Mutant) -> Plan:
    channels = {c: order for c, order in mutant.made.channels.items() if len(order) > 1}
    assume(channels)
    channel = mutant.data.draw(st.sampled_from(sorted(channels, key=str)), label="channel")
    turned = {**mutant.made.channels, channel: channels[channel][::-1]}
    return replace(mutant.made, channels=turned)


MUTATIONS = [
    swap,
    swap_kinds_of_one_microbatch,
    drop,
    repeat,
    move_to_another_worker,
    retarget_in_place,
    send_elsewhere,
    receive_from_nobody,
    start_too_early,
    take_no_time,
    name_another_microbatch,
    claim_a_shorter_period,
    claim_a_higher_bound,
    use_a_lost_worker,
    turn_a_channel_round,
]


@pytest.mark.parametrize("mutate", MUTATIONS)
@given(problem=problems(), data=st.data())
def test_a_plan_with_one_thing_changed_is_refused(
    mutate: Callable[[Mutant], Plan], problem: Problem, data: st.DataObject
) -> None:
    made = plan(problem)
    assert check(made) == []
    assert check(mutate(Mutant(made, data))) != []


@given(problem=problems())
def test_limits_below_the_peak_are_refused(problem: Problem) -> None:
    made = plan(replace(problem, in_flight=None))
    peak = max(made.peak_in_flight)
    assume(peak > 1)
    tight = replace(made.problem, in_flight=(peak - 1,) * problem.stages)
    assert any("in flight" in rule for rule in check(replace(made, problem=tight)))
