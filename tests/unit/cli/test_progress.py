from __future__ import annotations

import io

import pytest

from everstep.cli.progress import Progress


class Writes(io.StringIO):
    """Remembers what was written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, piece: str) -> int:
        self.pieces.append(piece)
        return len(piece)


def test_a_line_of_progress_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`print` writes a line and its end apart. Workers' lines came between the two from another
    thread, so that two lines stood on one and an empty one followed. Now it is one write.
    """
    written = Writes()
    monkeypatch.setattr("sys.stderr", written)
    with Progress(replicas=1, stages=2) as progress:
        progress.show({"event": "started", "address": "127.0.0.1:1", "replicas": 1, "stages": 2})
        for step in range(3):
            progress.show({"event": "step", "step": step, "loss": 0.5, "seconds": 0.1})
    first, *_, last = written.pieces
    assert first == "everstep: 127.0.0.1:1: starting 1 replicas x 2 stages\n"
    assert last.startswith("everstep: step 2  loss 0.5000")
    assert all(piece.count("\n") == 1 and piece.endswith("\n") for piece in written.pieces)
