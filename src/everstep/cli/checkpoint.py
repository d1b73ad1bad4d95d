"""`everstep checkpoint`: the verbs about checkpoints, each in its own file."""

from __future__ import annotations

import typer

from everstep.cli import checkpoint_files, checkpoint_plan


def add_to(app: typer.Typer) -> None:
    verbs = typer.Typer(
        help="Where checkpoints go, and what is in them.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    checkpoint_plan.add_to(verbs)
    checkpoint_files.add_to(verbs)
    app.add_typer(verbs, name="checkpoint")
