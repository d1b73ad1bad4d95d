"""Workers' lines."""

from __future__ import annotations

import os

from everstep.launch.output import MAX_LINE_BYTES, Output


def forwarded(*chunks: bytes) -> list[str]:
    lines: list[str] = []
    output = Output(lines.append)
    ours, theirs = os.pipe()
    output.follow(ours, label="1:2")
    for chunk in chunks:
        os.write(theirs, chunk)
    os.close(theirs)
    assert output.wait_drained(timeout_s=10)
    return lines


def test_lines_are_whole_marked_and_in_order() -> None:
    assert forwarded(b"first li", b"ne\nsecond\n") == ["[1:2] first line", "[1:2] second"]


def test_the_last_line_needs_no_end() -> None:
    assert forwarded(b"dying wo") == ["[1:2] dying wo"]


def test_bytes_that_are_no_text_do_not_stop_the_output() -> None:
    assert forwarded(b"\xff\n", b"fine\n") == ["[1:2] \ufffd", "[1:2] fine"]


def test_an_endless_line_is_passed_on_in_pieces() -> None:
    lines = forwarded(b"x" * (MAX_LINE_BYTES // 2), b"x" * (MAX_LINE_BYTES // 2), b"yy")
    assert [len(line) for line in lines] == [MAX_LINE_BYTES + len("[1:2] "), 2 + len("[1:2] ")]
