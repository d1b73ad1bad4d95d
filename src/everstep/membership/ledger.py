"""The books of the step that is being finished: who ran it, its loss, its gradient norm.

Pure. Who holds the step is not its business: some get it by copy, and the reports of those who ran
it count even when they are lost. Invariant: only one step is ever open. A worker may not run W of
step t+1, so not finish it, before Watermark(t), and Watermark(t) closes t: whoever reports anything
but the open step, or reports it twice, broke the watermark rule.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from everstep.core.errors import NormNotFinite, ProtocolBroken
from everstep.core.ids import WorkerId
from everstep.membership.facts import ClipMode, JobFacts, RollBack, StepResult
from everstep.membership.messages import StepDone

TORCH_CLIP_EPSILON = 1e-6
"""`torch.nn.utils.clip_grad_norm_` scales by clip_norm / (norm + 1e-6); so do we, to equal it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    loss: float | None
    metrics: dict[str, float]
    breakdown: dict[str, float]
    """Mean over the workers, by what the time went into."""

    norm: float | None
    """Of the whole gradient, when every stage reported its share."""


@dataclass(slots=True)
class StepLedger:
    stages: int
    open_step: int = 0
    reports: dict[WorkerId, StepDone] = field(default_factory=dict)

    def record(self, place: WorkerId, report: StepDone) -> None:
        if report.step != self.open_step:
            raise ProtocolBroken(
                f"it finished step {report.step} while step {self.open_step} was open",
                peer=f"worker {place}",
            )
        if place in self.reports:
            raise ProtocolBroken(f"it finished step {report.step} twice", peer=f"worker {place}")
        self.reports[place] = report

    def reopen(self) -> None:
        """The open step is undone by whoever took it, and will be run again."""
        self.reports = {}

    def result(self) -> StepResult | None:
        """Of the open step, when somebody has told it."""
        summary = self.summary()
        return None if summary.loss is None else StepResult(summary.loss, summary.metrics)

    def close(self) -> None:
        self.open_step += 1
        self.reports = {}

    def summary(self) -> StepSummary:
        ordered = [self.reports[place] for place in sorted(self.reports)]
        reporter = next((report for report in ordered if report.loss is not None), None)
        return StepSummary(
            loss=reporter.loss if reporter else None,
            metrics=dict(reporter.metrics) if reporter else {},
            breakdown=_means([report.breakdown for report in ordered]),
            norm=self._norm(),
        )

    def _norm(self) -> float | None:
        """Workers of a stage hold the same reduced gradient, so one report per stage counts."""
        by_stage = {
            place.stage: report.norm_squared
            for place, report in sorted(self.reports.items(), reverse=True)
            if report.norm_squared is not None
        }
        return math.sqrt(sum(by_stage.values())) if len(by_stage) == self.stages else None


def _means(breakdowns: list[dict[str, float]]) -> dict[str, float]:
    gathered: dict[str, list[float]] = defaultdict(list)
    for breakdown in breakdowns:
        for name, seconds in breakdown.items():
            gathered[name].append(seconds)
    return {name: sum(values) / len(values) for name, values in gathered.items()}


def decide_roll_back(job: JobFacts, *, step: int, norm: float | None) -> RollBack | None:
    """Whether a step that every worker has taken must be taken again with smaller gradients."""
    if job.clip_norm is None or job.clip_mode is not ClipMode.POST_VALIDATED:
        return None
    if norm is None:
        raise ProtocolBroken(f"it gave no norm_squared for step {step}", peer="a stage")
    if not math.isfinite(norm):
        raise NormNotFinite(step, norm)
    scale = job.clip_norm / (norm + TORCH_CLIP_EPSILON)
    return RollBack(step, scale) if scale < 1 else None
