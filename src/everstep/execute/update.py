"""The optimizer step of a stage, with clipping by the global norm, and taking it back.

Synchronous clipping asks all stages for their norms first. Post-validated clipping (ReCycle's)
steps at once; when the norms turn out too large, the step is undone from its gradients, which are
still there by the watermark rule, and taken again, scaled.
"""

from __future__ import annotations

import math

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.comm.group import Group
from everstep.core.errors import NormNotFinite
from everstep.execute.buckets import GradientBuckets
from everstep.execute.reduction import sum_over
from everstep.recovery.undo import Keep, StepRecord, UndoReport, remember, undo

CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`, so that both clip alike."""


class Update:
    """Of one stage on one worker. A stage without parameters has no optimizer."""

    def __init__(
        self,
        buckets: GradientBuckets,
        optimizer: Optimizer | None,
        scheduler: LRScheduler | None,
        *,
        keep: Keep = Keep.NOTHING,
    ) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._clipped: dict[int, float] = {}
        self._buckets = buckets
        self._keep = keep
        self._record: StepRecord | None = None

    def norm_squared(self) -> float:
        """Of the stage's reduced gradient."""
        norms = [torch.linalg.vector_norm(bucket.gradients) for bucket in self._buckets.buckets]
        if not norms:
            return 0.0
        # Read at once: each reading waits for the device.
        read: list[float] = torch.stack([norm.double() for norm in norms]).tolist()
        return sum(norm**2 for norm in read)

    def clip(self, step: int, *, clip_norm: float, world: Group, num_in_stage: int) -> None:
        """Scales the gradients when the norm over all stages is too large."""
        # All workers of a stage hold the same gradient, so each brings its share.
        share = self.norm_squared() / num_in_stage
        (total,) = sum_over(world, [share])
        norm = math.sqrt(total)
        if not math.isfinite(norm):
            raise NormNotFinite(step, norm)
        scale = clip_norm / (norm + CLIP_EPSILON)
        if scale < 1:
            self.scale(scale)
            self._clipped = {step: scale}

    def take_clipped(self) -> dict[int, float]:
        """By how much the gradients of the last step were scaled, if they were; says so once."""
        clipped, self._clipped = self._clipped, {}
        return clipped

    def step(self) -> None:
        if self.optimizer is None:
            return
        self._record = remember(self.optimizer, scheduler=self.scheduler, keep=self._keep)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def follow(self) -> None:
        """Takes the step that a peer took, with the peer's gradients in the buckets."""
        self._buckets.reattach()
        self._buckets.drop_unused()
        self.step()

    def take_back(self) -> UndoReport | None:
        """Undoes the last step; its gradients stay as they were applied."""
        if self.optimizer is None:
            return None
        return undo(self.optimizer, record=self._record)

    def redo(self, *, scale: float) -> UndoReport | None:
        """Takes the last step back and again, with its gradients scaled."""
        report = self.take_back()
        self.scale(scale)
        self.step()
        return report

    def scale(self, scale: float) -> None:
        """Of the gradients."""
        for bucket in self._buckets.buckets:
            bucket.gradients.mul_(scale)
