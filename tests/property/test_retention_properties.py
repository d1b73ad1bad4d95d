from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.checkpoint.retention import (
    AnyOf,
    Entry,
    KeepBest,
    KeepEvery,
    KeepLast,
    Retention,
    removable,
)
from everstep.core.errors import ConfigError

ENTRIES = st.lists(
    st.builds(
        Entry,
        step=st.integers(0, 500),
        loss=st.none() | st.floats(allow_nan=True),
        is_good=st.booleans(),
    ),
    unique_by=lambda entry: entry.step,
    max_size=30,
)
RULES: st.SearchStrategy[Retention] = st.one_of(
    st.builds(KeepLast, st.integers(1, 5)),
    st.builds(KeepEvery, st.integers(1, 200)),
    st.builds(KeepBest, st.integers(1, 5)),
)
JOINED = st.lists(RULES, min_size=1, max_size=3).map(lambda rules: AnyOf(tuple(rules)))


@given(entries=ENTRIES, rule=RULES | JOINED)
def test_the_newest_good_one_always_stays(entries: list[Entry], rule: Retention) -> None:
    good = [entry.step for entry in entries if entry.is_good]
    if good:
        assert max(good) in rule.keeps(entries)
        assert max(good) not in removable(entries, rule)


@given(entries=ENTRIES, rule=RULES | JOINED)
def test_only_good_ones_are_kept_and_only_good_ones_removed(
    entries: list[Entry], rule: Retention
) -> None:
    good = {entry.step for entry in entries if entry.is_good}
    kept, gone = rule.keeps(entries), removable(entries, rule)
    assert kept | set(gone) == good
    assert not kept & set(gone)


@given(entries=ENTRIES, rule=RULES | JOINED)
def test_removing_what_may_go_leaves_nothing_more_to_remove(
    entries: list[Entry], rule: Retention
) -> None:
    gone = set(removable(entries, rule))
    assert removable([entry for entry in entries if entry.step not in gone], rule) == []


@given(entries=ENTRIES, rules=st.lists(RULES, min_size=1, max_size=3))
def test_joined_rules_keep_what_any_of_them_keeps(
    entries: list[Entry], rules: list[Retention]
) -> None:
    kept = AnyOf(tuple(rules)).keeps(entries)
    assert kept == set().union(*(rule.keeps(entries) for rule in rules))


def test_each_rule_keeps_what_its_name_says() -> None:
    entries = [Entry(step, loss) for step, loss in ((10, 3.0), (20, 1.0), (31, 2.0), (40, None))]
    assert KeepLast(2).keeps(entries) == {31, 40}
    assert KeepEvery(20).keeps(entries) == {10, 20, 40}
    assert KeepBest(1).keeps(entries) == {20, 40}
    assert AnyOf((KeepLast(1), KeepBest(2))).keeps(entries) == {20, 31, 40}


@pytest.mark.parametrize("number", [0, -1])
def test_a_rule_that_keeps_nothing_is_refused(number: int) -> None:
    for rule in (KeepLast, KeepEvery, KeepBest):
        with pytest.raises(ConfigError, match="at least 1"):
            rule(number)
    with pytest.raises(ConfigError, match="at least one rule"):
        AnyOf(())
