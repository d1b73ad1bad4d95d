"""`everstep checkpoint ls, verify, export, import`: the checkpoints of a directory or URL.

What loads torch is imported by the verbs themselves: the planner's commands must not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from everstep.core.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from everstep.checkpoint.restore import Found, PassedOver

Directory = Annotated[str, typer.Argument(help="A directory, or any fsspec URL.")]
Step = Annotated[int | None, typer.Option(help="Default: the newest that verifies.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def add_to(app: typer.Typer) -> None:
    app.command("ls")(ls_command)
    app.command("verify")(verify_command)
    app.command("export")(export_command)
    app.command("import")(import_command)


def ls_command(directory: Directory, as_json: AsJson = False) -> None:
    """Lists the checkpoints, newest first; their manifests and sizes are checked."""
    rows = [_row(seen) for seen in _seen(directory)]
    if as_json:
        print(json.dumps(rows))
        return
    print(f"{'step':>9}{'size':>11}{'tensors':>9}{'parts':>7}{'loss':>10}  state")
    for row in rows:
        if row["problem"] is not None:
            print(f"{row['step']:>9}{'':37}  {row['problem']}")
            continue
        loss = "" if row["loss"] is None else f"{row['loss']:.4g}"
        print(
            f"{row['step']:>9}{row['bytes'] / 1e6:>8.1f} MB{row['tensors']:>9}{row['parts']:>7}"
            f"{loss:>10}  complete"
        )


def verify_command(directory: Directory, step: Step = None, as_json: AsJson = False) -> None:
    """Reads every byte and compares checksums. Exit status 1 when something is wrong."""
    rows = []
    for seen in _seen(directory):
        row = _row(seen)
        if step is not None and row["step"] != step:
            continue
        row["problems"] = [seen.why] if _is_passed_over(seen) else seen.problems()
        rows.append(row)
    if not rows:
        raise _nothing_in(directory, step)
    if as_json:
        print(json.dumps([{key: row[key] for key in ("step", "problems")} for row in rows]))
    else:
        for row in rows:
            print(f"step {row['step']}: {'; '.join(row['problems']) or 'good'}")
    if any(row["problems"] for row in rows):
        raise typer.Exit(1)


def export_command(
    directory: Directory,
    to: Annotated[Path, typer.Option(help="A file *.safetensors, or a new directory for DCP.")],
    step: Step = None,
    prefix: Annotated[
        str, typer.Option(help="Only names that start so, without it: 'model/' for the weights.")
    ] = "",
) -> None:
    """Writes a checkpoint as one safetensors file or as a DCP directory, verified on the way."""
    from everstep.checkpoint.export import write_dcp, write_safetensors

    found = _chosen(directory, step)
    if to.suffix == ".safetensors":
        number = write_safetensors(found, to, prefix=prefix)
        print(f"{to}: {number} tensors of step {found.step}")
        return
    if prefix:
        raise ConfigError("--prefix", prefix, "only a .safetensors file can hold a part")
    if to.exists():
        raise ConfigError("--to", to, "it exists already")
    write_dcp(found, to)
    print(f"{to}: step {found.step}, for torch.distributed.checkpoint.load")


def import_command(
    source: Annotated[Path, typer.Argument(help="A file of torch.save, or a DCP directory.")],
    directory: Directory,
    step: Annotated[int, typer.Option(help="The step it is to be.")] = 0,
) -> None:
    """Makes a checkpoint of another tool's; code inside it is never run."""
    from everstep.checkpoint.export import read_dcp, read_torch_save, write_checkpoint

    if not source.exists():
        raise ConfigError("SOURCE", source, "it does not exist")
    tree = read_dcp(source) if source.is_dir() else read_torch_save(source)
    write_checkpoint(tree, directory, step=step)
    print(f"{directory}: step {step}, from {source}")


def _seen(directory: str) -> Iterator[Found | PassedOver]:
    from everstep.checkpoint.restore import checkpoints_in, look_at

    return map(look_at, checkpoints_in(directory))


def _is_passed_over(seen: Found | PassedOver) -> TypeIs[PassedOver]:
    from everstep.checkpoint.restore import PassedOver

    return isinstance(seen, PassedOver)


def _row(seen: Found | PassedOver) -> dict[str, Any]:
    step = int(seen.path.name.removeprefix("step-"))
    if _is_passed_over(seen):
        return {"step": step, "problem": seen.why}
    manifest = seen.manifest
    return {
        "step": step,
        "bytes": manifest.size_bytes,
        "tensors": len(seen.names()),
        "parts": len(manifest.parts),
        "loss": manifest.about.get("loss"),
        "run": manifest.run,
        "problem": None,
    }


def _chosen(directory: str, step: int | None) -> Found:
    from everstep.checkpoint.restore import newest

    if step is None:
        found = newest(directory)
        if found is None:
            raise _nothing_in(directory, step)
        return found
    for seen in _seen(directory):
        if not _is_passed_over(seen) and seen.step == step:
            return seen.verified()
    raise _nothing_in(directory, step)


def _nothing_in(directory: str, step: int | None) -> ConfigError:
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    return ConfigError("DIRECTORY", directory, f"there is {what} in it")
