"""Exit codes in words."""

from __future__ import annotations

import signal


def describe_exit(code: int) -> str:
    """`code` as `subprocess` gives it: negative for the signal that ended the process."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
