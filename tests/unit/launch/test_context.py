"""Who a worker is."""

from __future__ import annotations

from typing import cast

import pytest

from everstep.core.errors import ConfigError
from everstep.launch.context import WorkerContext, read_context
from everstep.membership.client import Client


def test_a_worker_reads_back_what_its_agent_wrote() -> None:
    context = WorkerContext(
        coordinator="127.0.0.1:80",
        uid="u-1",
        number=3,
        host="127.0.0.3",
        local_number=1,
        num_local=4,
        token="secret",
    )
    assert read_context(context.environment()) == context


def test_a_plain_python_run_has_no_context() -> None:
    assert read_context({"PATH": "/bin"}) is None


def test_the_token_is_not_shown() -> None:
    context = WorkerContext(coordinator="c", uid="u", number=0, host="h", token="secret")
    assert "secret" not in repr(context)


def test_a_process_trains_one_job() -> None:
    """A script that called `everstep.train` twice ended with an AssertionError of ours, which
    named neither the call nor the rule. It is the user's mistake, so it is a ConfigError.
    """
    connected = cast(Client, object())
    context = WorkerContext(coordinator="c", uid="u", number=0, host="h", client=connected)
    with pytest.raises(ConfigError, match="is called again"):
        context.connect(data_address="h:1")
