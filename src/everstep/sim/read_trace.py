"""Reads traces. Four formats, told apart by their content:

    own          time_s,node,lost or joined          `#` starts a comment; a header line is allowed
    spot         milliseconds,add or remove,node     the AWS traces of uclasystem/bamboo
    count        date, time, available nodes         the GCP traces of uclasystem/bamboo
    faults       JSON list of fault_start, fault_end the traces of stepfun-ai/InfiniteHBD-Trace

A row that is not of its format is one error with the line number.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from everstep.core.errors import ConfigError, TraceInvalid
from everstep.sim.trace import DAY_S, Trace, make_trace

Row = tuple[int, list[str]]
"""Line number and fields."""


def read_trace(path: Path, *, num_servers: int | None = None, seed: int = 0) -> Trace:
    """Reads any of the formats.

    Args:
        num_servers: of the cluster that the file describes, where it names only those that failed.
        seed: chooses which nodes go, where the file only counts them.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--trace", path, str(error)) from None
    if text.lstrip().startswith("["):
        return read_faults(text, path.name, num_servers=num_servers)
    rows = list(_rows(text))
    if not rows:
        raise TraceInvalid(path.name, 1, "the file has no rows")
    first = rows[0][1]
    if re.fullmatch(r"\d{4}-\d\d-\d\d", first[0]):
        return read_counts(rows, path.name, seed=seed)
    if len(first) == 3 and first[1] in ("add", "remove"):
        return read_spot(rows, path.name)
    return read_own(rows, path.name, num_nodes=num_servers)


def _rows(text: str) -> Iterator[Row]:
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.split("#", maxsplit=1)[0].strip()
        if content:
            yield number, [field.strip() for field in next(csv.reader([content]))]


def read_own(rows: list[Row], name: str, *, num_nodes: int | None) -> Trace:
    """Nodes are named; those that are not mentioned never fail. A node whose first row says that it
    joined was not there before. The last row ends the trace: `time_s,,end` says when otherwise."""
    if rows[0][1] == ["time_s", "node", "change"]:
        rows = rows[1:]
    numbers: dict[str, int] = {}
    changes, down, end_s = [], [], 0.0
    for line, fields in rows:
        time_s, node, change = _three(name, line, fields)
        seconds = _number(name, line, time_s)
        end_s = max(end_s, seconds)
        if change == "end":
            continue
        if change not in ("lost", "joined"):
            raise TraceInvalid(name, line, f"'{change}' is not lost, joined or end")
        if node not in numbers:
            numbers[node] = len(numbers)
            if change == "joined":
                down.append(numbers[node])
        changes.append((seconds, numbers[node], change == "lost"))
    return make_trace(
        changes,
        name=name,
        num_nodes=_size(num_nodes, len(numbers)),
        duration_s=end_s,
        starts_down=down,
    )


def read_spot(rows: list[Row], name: str) -> Trace:
    """Every new machine has a new name, so it takes the lowest place that is free: a node here is
    such a place. All places are empty before the first row, which is time 0."""
    parsed = []
    for line, fields in rows:
        time_ms, change, node = _three(name, line, fields)
        if change not in ("add", "remove"):
            raise TraceInvalid(name, line, f"'{change}' is neither add nor remove")
        parsed.append((_number(name, line, time_ms) / 1e3, line, change == "remove", node))
    # At equal times the leaving go first, else more places would be needed than there ever were.
    parsed.sort(key=lambda row: (row[0], not row[2]))
    start_s = parsed[0][0]
    place_of: dict[str, int] = {}
    free: list[int] = []
    num_places = 0
    changes = []
    for time_s, line, is_loss, node in parsed:
        if is_loss:
            if node not in place_of:
                raise TraceInvalid(name, line, f"{node} is removed and was never added")
            place = place_of.pop(node)
            free.append(place)
        else:
            if node in place_of:
                raise TraceInvalid(name, line, f"{node} is added and is there already")
            free.sort()
            place = free.pop(0) if free else num_places
            num_places = max(num_places, place + 1)
            place_of[node] = place
        changes.append((time_s - start_s, place, is_loss))
    # Who is there from the first moment on has not just joined.
    at_start = {place for time_s, place, is_loss in changes if time_s == 0 and not is_loss}
    return make_trace(
        [row for row in changes if row[0] > 0],
        name=name,
        num_nodes=num_places,
        duration_s=changes[-1][0],
        starts_down=[place for place in range(num_places) if place not in at_start],
    )


def read_counts(rows: list[Row], name: str, *, seed: int) -> Trace:
    """Only the number of available nodes is known: which ones go is drawn; the first to go is the
    first to come back."""
    samples = []
    for line, fields in rows:
        day, clock, text = _three(name, line, fields)
        samples.append((_moment(name, line, day, clock), _count(name, line, text)))
    samples.sort(key=lambda sample: sample[0])
    start_s, num_nodes = samples[0][0], max(count for _, count in samples)
    rng = np.random.default_rng(seed)
    order = rng.permutation(num_nodes).tolist()
    up, down = order[: samples[0][1]], order[samples[0][1] :]
    starts_down = list(down)
    changes = []
    for time_s, count in samples:
        while len(up) > count:
            node = up.pop(int(rng.integers(len(up))))
            down.append(node)
            changes.append((time_s - start_s, node, True))
        while len(up) < count:
            node = down.pop(0)
            up.append(node)
            changes.append((time_s - start_s, node, False))
    return make_trace(
        changes,
        name=name,
        num_nodes=num_nodes,
        duration_s=samples[-1][0] - start_s,
        starts_down=starts_down,
    )


def read_faults(text: str, name: str, *, num_servers: int | None) -> Trace:
    """Times in days. Faults of one node may overlap: it is down while any of them lasts."""
    try:
        entries = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceInvalid(name, error.lineno, error.msg) from None
    line_of = _entry_lines(text)
    numbers: dict[str, int] = {}
    parsed = []
    for index, entry in enumerate(entries):
        line = line_of(index)
        match entry:
            case {
                "node_id": str(node),
                "event_time": int() | float() as day,
                "event_type": "fault_start" | "fault_end" as kind,
            }:
                number = numbers.setdefault(node, len(numbers))
                parsed.append((day * DAY_S, number, kind == "fault_start"))
            case _:
                rule = "an entry needs node_id, event_time in days, and fault_start or fault_end"
                raise TraceInvalid(name, line, rule)
    if not parsed:
        raise TraceInvalid(name, 1, "the file has no entries")
    parsed.sort(key=lambda row: row[0])
    open_faults = [0] * len(numbers)
    changes = []
    for time_s, number, is_start in parsed:
        open_faults[number] = max(0, open_faults[number] + (1 if is_start else -1))
        changes.append((time_s, number, open_faults[number] > 0))
    return make_trace(
        changes,
        name=name,
        num_nodes=_size(num_servers, len(numbers)),
        duration_s=parsed[-1][0],
    )


def _entry_lines(text: str) -> Callable[[int], int]:
    """Where the entries of a JSON list begin, found only when there is something to complain."""

    def line_of(index: int) -> int:
        decoder, position = json.JSONDecoder(), text.index("[") + 1
        for _ in range(index):
            position = _skip(text, position)
            _, position = decoder.raw_decode(text, position)
        return text.count("\n", 0, _skip(text, position)) + 1

    return line_of


def _skip(text: str, position: int) -> int:
    while text[position] in " \t\r\n,":
        position += 1
    return position


def _three(name: str, line: int, fields: list[str]) -> tuple[str, str, str]:
    if len(fields) != 3:
        raise TraceInvalid(name, line, f"a row has 3 fields, this one {len(fields)}")
    return fields[0], fields[1], fields[2]


def _number(name: str, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise TraceInvalid(name, line, f"'{text}' is not a time: a number, not negative")
    return value


def _count(name: str, line: int, text: str) -> int:
    if not text.isdecimal():
        raise TraceInvalid(name, line, f"'{text}' is not a number of nodes")
    return int(text)


def _moment(name: str, line: int, day: str, clock: str) -> float:
    try:
        return datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise TraceInvalid(name, line, f"'{day}, {clock}' is not a date and a time") from None


def _size(given: int | None, num_named: int) -> int:
    if given is None:
        return num_named
    if given < num_named:
        raise ConfigError("--servers", given, f"the trace names {num_named} nodes")
    return given
