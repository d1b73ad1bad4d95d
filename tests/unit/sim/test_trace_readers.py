"""The four trace formats, good and bad."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everstep.core.errors import ConfigError, TraceInvalid
from everstep.sim.read_trace import read_trace
from everstep.sim.trace import Change, Trace, cut, fit, make_trace, rows_of


def read(tmp_path: Path, text: str, **options: int) -> Trace:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    return read_trace(path, **options)


def test_the_own_format_has_names_comments_a_header_and_an_end(tmp_path: Path) -> None:
    text = "# mine\ntime_s,node,change\n20,b,joined\n10,a,lost\n30,a,joined # back\n100,,end\n"
    trace = read(tmp_path, text)
    assert trace.num_nodes == 2
    assert trace.duration_s == 100
    assert rows_of(trace) == [(10, 1, True), (20, 0, False), (30, 1, False)]
    assert trace.starts_down.tolist() == [True, False]


def test_nodes_that_never_fail_are_counted_when_told(tmp_path: Path) -> None:
    assert read(tmp_path, "1,a,lost\n9,,end\n", num_servers=5).num_nodes == 5


def test_a_spot_machine_takes_the_lowest_free_place(tmp_path: Path) -> None:
    text = "0,add,n1\n0,add,n2\n5000,remove,n1\n9000,add,n3\n10000,remove,n2\n"
    trace = read(tmp_path, text)
    assert trace.num_nodes == 2
    assert rows_of(trace) == [(5, 0, True), (9, 0, False)]
    assert trace.duration_s == 10


def test_a_spot_machine_that_is_replaced_at_once_needs_no_further_place(tmp_path: Path) -> None:
    text = "0,add,n1\n5000,add,n2\n5000,remove,n1\n9000,remove,n2\n"
    assert read(tmp_path, text).num_nodes == 1


def test_counts_lose_and_return_as_many_nodes_as_they_say(tmp_path: Path) -> None:
    text = "2021-12-11, 11:00:00, 3\n2021-12-11, 11:01:00, 1\n2021-12-12, 11:00:00, 4\n"
    trace = read(tmp_path, text, seed=3)
    assert trace.num_nodes == 4
    assert trace.starts_down.sum() == 1
    assert trace.num_losses == 2
    assert trace.duration_s == 24 * 3600
    assert rows_of(trace) == rows_of(read(tmp_path, text, seed=3))


def test_a_node_with_overlapping_faults_is_down_until_the_last_ends(tmp_path: Path) -> None:
    entries = [(1.0, "start"), (2.0, "start"), (3.0, "end"), (4.0, "end"), (5.0, "start")]
    document = [
        {"node_id": "n", "event_time": day, "event_type": f"fault_{kind}"} for day, kind in entries
    ]
    document.append({"node_id": "n", "event_time": 6.0, "event_type": "fault_end"})
    trace = read(tmp_path, json.dumps(document), num_servers=3)
    days = [(time_s / 86400, node, is_loss) for time_s, node, is_loss in rows_of(trace)]
    assert days == [(1, 0, True), (4, 0, False), (5, 0, True)]
    assert trace.num_nodes == 3


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("10,a,lost\n\nsoon,a,joined\n", 3, "'soon' is not a time"),
        ("10,a,lost\n20,a\n", 2, "3 fields, this one 2"),
        ("10,a,lost\n20,a,gone\n", 2, "'gone' is not lost, joined or end"),
        ("10,a,lost\n-1,a,joined\n", 2, "'-1' is not a time"),
        ("nan,a,lost\n", 1, "'nan' is not a time"),
        ("0,add,a\n1,add,a\n", 2, "is there already"),
        ("0,add,a\n1,remove,b\n", 2, "never added"),
        ("0,add,a\n1,drop,a\n", 2, "neither add nor remove"),
        ("2021-12-11, 11:00:00, 3\n2021-13-11, 11:00:00, 3\n", 2, "not a date"),
        ("2021-12-11, 11:00:00, 3\n2021-12-11, 11:00:00, -3\n", 2, "not a number of nodes"),
        ('[\n{"node_id": "a", "event_time": 1, "event_type": "fault_start"},\n{}]', 3, "node_id"),
        ("[\n{]", 2, "double quotes"),
        ("", 1, "no rows"),
    ],
)
def test_a_bad_row_is_one_error_with_its_line(
    tmp_path: Path, text: str, line: int, why: str
) -> None:
    with pytest.raises(TraceInvalid, match=f"trace.txt, line {line}: .*{why}"):
        read(tmp_path, text)


def test_a_missing_file_is_a_bad_option(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--trace"):
        read_trace(tmp_path / "none")


def test_rows_of_one_moment_are_one_change() -> None:
    rows = [(5.0, 1, True), (2.0, 0, True), (5.0, 0, False)]
    trace = make_trace(rows, name="t", num_nodes=2, duration_s=9)
    assert list(trace.changes()) == [
        Change(time_s=2.0, lost=(0,), joined=()),
        Change(time_s=5.0, lost=(1,), joined=(0,)),
    ]


def test_what_is_no_news_is_dropped() -> None:
    rows = [(1.0, 0, False), (2.0, 0, True), (3.0, 0, True), (20.0, 0, False)]
    trace = make_trace(rows, name="t", num_nodes=1, duration_s=10)
    assert rows_of(trace) == [(2.0, 0, True)]
    assert trace.up_node_seconds() == 2
    assert trace.mean_outage_s() == 8


def test_a_larger_cluster_fails_as_often_per_node() -> None:
    rows = [(10.0, 0, True), (30.0, 0, False)]
    trace = make_trace(rows, name="t", num_nodes=1, duration_s=100)
    tripled = fit(trace, 3, seed=1)
    assert tripled.num_losses == 3
    assert tripled.up_node_seconds() == pytest.approx(3 * trace.up_node_seconds())
    assert len(set(tripled.time_s[tripled.is_loss].tolist())) == 3


def test_a_smaller_cluster_gets_whole_histories() -> None:
    rows = [(float(node + 1), node, True) for node in range(10)]
    trace = make_trace(rows, name="t", num_nodes=10, duration_s=100)
    assert fit(trace, 4, seed=0).num_losses == 4
    assert cut(trace, 5.5).num_losses == 5
