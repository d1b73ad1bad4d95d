"""What was seen of failures, in `failures.json` beside the checkpoints, over all runs of a job.

A run that ends on purpose says so; a start that finds one that did not counts a failure. Lost
records cost nothing but knowledge, so trouble with the file is logged and nothing more.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from everstep.checkpoint.failure_rate import FailureRate
from everstep.checkpoint.remote_storage import is_url, staging_directory
from everstep.core.errors import ConfigError

FILE = "failures.json"

_logger = logging.getLogger("everstep.checkpoint")


def local_directory(directory: str | Path) -> Path:
    """Where what is kept beside checkpoints is. Behind a URL: on this machine, where shards wait
    for their upload; what was seen on another machine is then not known."""
    return staging_directory(str(directory)) if is_url(directory) else Path(directory)


class RunRecord:
    """Kept by rank 0; the others only read it."""

    def __init__(self, directory: Path, *, workers: int, is_writer: bool) -> None:
        self._path = directory / FILE
        self._workers = workers
        self._is_writer = is_writer
        self._is_running: bool | None = None
        """None: it was never this process's run to tell of."""

        self.rate = FailureRate()
        self.failures_per_second = self.rate.per_second(workers)

    def begin(self, *, is_first: bool = True) -> bool:
        """Whether the run before this one ended without a word. `is_first`: there is none that
        still runs and that this one only takes over from."""
        document = self._read()
        if "failures" in document:
            try:
                self.rate = FailureRate.from_json(document)
            except ConfigError as error:
                _logger.warning("%s cannot be used, failures are counted anew: %s", FILE, error)
        has_failed = is_first and document.get("is_running") is True
        self._see(seconds=0.0, failures=int(has_failed))
        self.go_on()
        return has_failed

    def note(self, seconds: float) -> None:
        """So many more seconds of training; also after the end, when a save has ended later."""
        self._see(seconds=seconds, failures=0)
        self._write()

    def end(self) -> None:
        """This run ends on purpose."""
        self._is_running = False
        self._write()

    def go_on(self) -> None:
        """It runs, or does so again."""
        self._is_running = True
        self._write()

    def _see(self, *, seconds: float, failures: int) -> None:
        self.rate = self.rate.seen(seconds=seconds, workers=self._workers, failures=failures)
        # Worked out here, when something was seen, and not at every step.
        self.failures_per_second = self.rate.per_second(self._workers)

    def _read(self) -> Mapping[str, object]:
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _logger.warning("%s cannot be read, failures are counted anew: %s", self._path, error)
            return {}
        return document if isinstance(document, dict) else {}

    def _write(self) -> None:
        if not self._is_writer or self._is_running is None:
            return
        document = {**self.rate.to_json(), "is_running": self._is_running}
        beside = self._path.with_suffix(".json.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps(document), encoding="utf-8")
            os.replace(beside, self._path)
        except OSError as error:
            _logger.warning("%s cannot be written: %s", self._path, error)
