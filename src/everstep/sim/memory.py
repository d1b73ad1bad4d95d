"""Does it fit? One sentence with the numbers when it does not."""

from __future__ import annotations

from everstep.sim.job import Job

GB = 1e9


def does_not_fit(job: Job, *, state_factor: float = 1.0, in_flight: int = 1) -> str | None:
    """Checks the fullest device: its state, and the micro-batches it must hold at least."""
    for number, layers in enumerate(job.slices()):
        state = sum(layer.state_bytes for layer in layers) * state_factor
        held = sum(layer.activation_bytes for layer in layers) * in_flight
        if state + held > job.device_bytes:
            return (
                f"stage {number} needs {state / GB:.1f} GB of state and {held / GB:.1f} GB for"
                f" {in_flight} micro-batches; a device has {job.device_bytes / GB:.1f} GB"
            )
    return None
