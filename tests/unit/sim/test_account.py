"""The account: time adds up, whatever happens in it."""

from __future__ import annotations

import math

import pytest

from everstep.sim.account import Account, Cause


def account(step_s: float = 10.0) -> Account:
    made = Account(samples_per_step=4)
    made.run_at(step_s)
    return made


def test_without_failures_all_time_is_useful() -> None:
    books = account()
    books.advance(1000)
    assert books.steps == 100
    assert books.useful_s == 1000
    assert (books.curve_s, books.curve_rate) == ([0.0], [0.4])


def test_a_pause_stops_the_steps_and_is_counted_by_its_cause() -> None:
    books = account()
    books.advance(100)
    books.pause((Cause.NOTICING, 5), (Cause.GROUPS, 15))
    books.advance(200)
    assert books.steps == 18
    assert books.down_s == {Cause.NOTICING: 5, Cause.GROUPS: 15}
    assert books.curve_rate == [0.4, 0.0, 0.4]


def test_a_pause_inside_a_pause_runs_beside_it() -> None:
    books = account()
    books.pause((Cause.RESTART, 50))
    books.advance(10)
    books.pause((Cause.NOTICING, 15))
    books.advance(100)
    assert books.down_s == {Cause.RESTART: 35, Cause.NOTICING: 15}
    assert books.steps == 5


def test_a_second_restart_begins_again() -> None:
    books = account()
    books.pause((Cause.RESTART, 50))
    books.advance(40)
    books.pause((Cause.RESTART, 50))
    books.advance(100)
    assert books.down_s[Cause.RESTART] == 90


def test_an_interrupted_step_is_run_again() -> None:
    books = account()
    books.advance(104)
    books.drop_partial_step()
    assert books.steps == 10
    assert books.down_s[Cause.REDO] == pytest.approx(4)
    assert books.steps_lost == 0


def test_checkpoints_stall_and_bound_what_is_lost() -> None:
    books = account()
    books.save_every(5, stall_s=2, durable_s=3)
    books.advance(52 * 3 + 24)  # three cycles and 2.4 steps
    assert books.num_saves == 3
    assert books.steps == pytest.approx(17.4)
    assert books.down_s[Cause.STALL] == pytest.approx(6)
    books.roll_back()
    assert books.steps == 15
    assert books.steps_lost == pytest.approx(2)
    assert books.down_s[Cause.REDO] + books.down_s[Cause.REWORK] == pytest.approx(24)


def test_a_checkpoint_that_is_not_durable_yet_does_not_count() -> None:
    books = account()
    books.save_every(5, stall_s=2, durable_s=30)
    books.advance(52 * 3 + 20)
    books.roll_back()
    assert books.steps == 10
    assert books.steps_lost == pytest.approx(7)
    assert books.useful_s == pytest.approx(100)


def test_many_short_advances_equal_one_long() -> None:
    one, many = account(7.0), account(7.0)
    for books in (one, many):
        books.save_every(3, stall_s=1, durable_s=2)
    one.advance(1000)
    for time_s in range(1, 1001):
        many.advance(time_s)
    assert many.steps == pytest.approx(one.steps, abs=0.2)
    assert many.num_saves == one.num_saves


def test_standing_still_is_waiting() -> None:
    books = account(math.inf)
    books.advance(100)
    assert books.steps == 0
    assert books.down_s == {Cause.WAITING: 100}


def test_a_save_before_an_announced_loss_loses_nothing_but_the_step() -> None:
    books = account()
    books.save_every(100, stall_s=0, durable_s=1)
    books.advance(55)
    books.save_now()
    books.roll_back()
    assert books.steps == 5
    assert books.steps_lost == 0


def test_when_so_many_steps_will_be_done() -> None:
    account = Account(samples_per_step=1)
    account.run_at(2.0)
    account.advance(5.0)
    account.pause((Cause.GROUPS, 1.0), (Cause.FILLING, 0.5))
    assert account.reaches_s(4) == 5.0 + 1.5 + 1.5 * 2.0
    account.advance(account.reaches_s(4))
    assert account.steps == 4
