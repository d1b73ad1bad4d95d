"""Synthetic traces: as many failures as asked for, and the same ones from the same seed."""

from __future__ import annotations

import pytest

from everstep.core.errors import ConfigError
from everstep.sim.generate import Kind, Rates, at_once, generate, monotone
from everstep.sim.trace import DAY_S, HOUR_S, rows_of

RATES = Rates(mtbf_s=10 * DAY_S, repair_s=6 * HOUR_S)


@pytest.mark.parametrize("kind", Kind)
def test_nodes_fail_about_as_often_as_asked(kind: Kind) -> None:
    trace = generate(kind, RATES, num_nodes=64, duration_s=200 * DAY_S, seed=0)
    expected = 64 * 200 / 10.25
    assert trace.num_losses == pytest.approx(expected, rel=0.25)
    assert trace.mean_outage_s() == pytest.approx(RATES.repair_s, rel=0.2)


@pytest.mark.parametrize("kind", Kind)
def test_the_same_seed_gives_the_same_trace(kind: Kind) -> None:
    one, same, other = (
        rows_of(generate(kind, RATES, num_nodes=8, duration_s=50 * DAY_S, seed=seed))
        for seed in (3, 3, 4)
    )
    assert one == same != other


def test_racks_fail_together() -> None:
    rates = Rates(mtbf_s=10 * DAY_S, repair_s=HOUR_S, rack_fraction=1.0, rack_nodes=4)
    trace = generate(Kind.RACKS, rates, num_nodes=16, duration_s=50 * DAY_S, seed=0)
    sizes = {len(change.lost) for change in trace.changes() if change.lost}
    assert 4 in sizes


def test_spot_losses_are_announced() -> None:
    trace = generate(Kind.SPOT, RATES, num_nodes=8, duration_s=50 * DAY_S, seed=0)
    assert trace.notice_s == 120


def test_young_nodes_fail_more_often_under_infant_mortality() -> None:
    def early(kind: Kind) -> int:
        trace = generate(kind, RATES, num_nodes=500, duration_s=DAY_S, seed=0)
        return trace.num_losses

    assert early(Kind.WEIBULL) > 1.5 * early(Kind.EXPONENTIAL)


def test_monotone_removals_stop_at_half() -> None:
    trace = monotone(every_s=HOUR_S, num_nodes=8, duration_s=DAY_S, seed=0)
    assert trace.time_s.tolist() == [3600.0, 7200.0, 10800.0, 14400.0]
    assert len(set(trace.node.tolist())) == 4


def test_a_share_is_lost_at_once() -> None:
    assert at_once(0.1, num_nodes=192, duration_s=DAY_S, seed=0).num_losses == 19


def test_bad_rates_name_the_field() -> None:
    with pytest.raises(ConfigError, match="mtbf_s"):
        Rates(mtbf_s=0, repair_s=1)
