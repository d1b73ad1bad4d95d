"""Runs the `everstep` command inside the test process, as a user would from a shell."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from everstep.cli.main import main


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    status: int
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.stdout)
        return document


def everstep(command: str) -> Finished:
    """`everstep("plan --replicas 3 ...")`; colours are off because the output is no terminal."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "argv", ["everstep", *command.split()]),
    ):
        try:
            main()
        except SystemExit as stop:
            status = stop.code
    assert isinstance(status, int)
    return Finished(status=status, stdout=out.getvalue(), stderr=err.getvalue())


SHAPE_3X4X6 = "plan --replicas 3 --stages 4 --microbatches 6"
