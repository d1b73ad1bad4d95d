"""The `everstep` command: verbs, and one place where errors become one line and an exit status."""

from __future__ import annotations

import sys

import typer

from everstep.cli import checkpoint, demo, run, simulate, status
from everstep.cli import plan as plan_command
from everstep.core.errors import EverstepError

USAGE_ERROR = 2

# typer brings its own copy of click in newer versions; this is the base of its usage errors in all.
_UsageProblem: type[typer.BadParameter] = next(
    c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException"
)

app = typer.Typer(
    help="Trains PyTorch models through failures and never loses a step.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
plan_command.add_to(app)
demo.add_to(app)
run.add_to(app)
status.add_to(app)
checkpoint.add_to(app)
simulate.add_to(app)


@app.callback()
def _everstep() -> None:
    pass


def main() -> None:
    """Runs the command line. Bad input is one line on stderr and exit status 2."""
    try:
        status = app(prog_name="everstep", standalone_mode=False)
    except _UsageProblem as error:
        _complain(error.format_message())
        status = USAGE_ERROR
    except EverstepError as error:
        _complain(str(error))
        status = USAGE_ERROR
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        status = 130
    sys.exit(status or 0)


def _complain(message: str) -> None:
    print(f"everstep: {' '.join(message.split())}", file=sys.stderr)
