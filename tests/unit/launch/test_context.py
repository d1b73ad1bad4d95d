"""Who a worker is."""

from __future__ import annotations

from everstep.launch.context import WorkerContext, read_context


def test_a_worker_reads_back_what_its_agent_wrote() -> None:
    context = WorkerContext(
        coordinator="127.0.0.1:80", uid="u-1", number=3, host="127.0.0.3", token="secret"
    )
    assert read_context(context.environment()) == context


def test_a_plain_python_run_has_no_context() -> None:
    assert read_context({"PATH": "/bin"}) is None


def test_the_token_is_not_shown() -> None:
    context = WorkerContext(coordinator="c", uid="u", number=0, host="h", token="secret")
    assert "secret" not in repr(context)
