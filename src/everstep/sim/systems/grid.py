"""Who sits where: workers of the cluster in the places of a job, replica * stages + stage. [pure]

Knows no time and no costs. Invariant: `losses` counts the empty places of each stage.
"""

from __future__ import annotations

from everstep.sim.job import Job

OUTSIDE = -1
"""The place of a worker that is lost or waits, and who sits in an empty place."""


class Grid:
    def __init__(self, job: Job, *, num_workers: int) -> None:
        self._job = job
        self._is_up = [True] * num_workers
        self._place_of = [n if n < job.num_workers else OUTSIDE for n in range(num_workers)]
        self._worker_at = list(range(job.num_workers))
        self.losses = [0] * job.stages

    @property
    def num_live(self) -> int:
        return self._job.num_workers - sum(self.losses)

    @property
    def live_per_stage(self) -> list[int]:
        return [self._job.replicas - lost for lost in self.losses]

    def lose(self, workers: list[int]) -> list[int]:
        """The stages that they leave; those who only waited leave none."""
        stages = []
        for worker in workers:
            self._is_up[worker] = False
            if self._place_of[worker] != OUTSIDE:
                stages.append(self._vacate(worker))
        return stages

    def admit(self, joined: list[int]) -> int:
        """So many of them, and of those who waited, now sit in empty places."""
        self.note_up(joined)
        return sum(self._seat(worker) for worker in joined + self._waiting())

    def note_up(self, joined: list[int]) -> None:
        for worker in joined:
            self._is_up[worker] = True

    def move(self, donor_stage: int, vacancy_stage: int) -> None:
        """Some worker of one stage to some empty place of the other: only stages matter."""
        worker = next(w for w in map(self._at, self._column(donor_stage)) if w != OUTSIDE)
        self._vacate(worker)
        self._sit(worker, self._vacancy(vacancy_stage))

    def spread(self) -> None:
        """All live workers over the stages: who can keeps its own place, the others fill up."""
        job = self._job
        live = [worker for worker, is_up in enumerate(self._is_up) if is_up]
        self._place_of = [OUTSIDE] * len(self._is_up)
        self._worker_at = [OUTSIDE] * job.num_workers
        self.losses = [job.replicas] * job.stages
        for worker in live:
            if worker < job.num_workers:
                self._sit(worker, worker)
        for worker in live:
            if worker >= job.num_workers and any(self.losses):
                self._sit(worker, self._vacancy(self._hardest_hit()))
        self.fill_empty_stages()

    def fill_empty_stages(self) -> list[int]:
        """From the fullest, when there are enough workers for all; the stages they came from."""
        donors = []
        while self.num_live >= self._job.stages and max(self.losses) == self._job.replicas:
            donors.append(self.losses.index(min(self.losses)))
            self.move(donors[-1], self._hardest_hit())
        return donors

    def _waiting(self) -> list[int]:
        """Workers beyond the job's, who take the places of the lost."""
        beyond = range(self._job.num_workers, len(self._is_up))
        return [w for w in beyond if self._is_up[w] and self._place_of[w] == OUTSIDE]

    def _seat(self, worker: int) -> bool:
        """At its own place, or where it helps most; False when it has one, or all are taken."""
        if self._place_of[worker] != OUTSIDE or not any(self.losses):
            return False
        is_own_free = worker < self._job.num_workers and self._at(worker) == OUTSIDE
        self._sit(worker, worker if is_own_free else self._vacancy(self._hardest_hit()))
        return True

    def _hardest_hit(self) -> int:
        return self.losses.index(max(self.losses))

    def _vacancy(self, stage: int) -> int:
        return next(place for place in self._column(stage) if self._at(place) == OUTSIDE)

    def _column(self, stage: int) -> range:
        return range(stage, self._job.num_workers, self._job.stages)

    def _at(self, place: int) -> int:
        return self._worker_at[place]

    def _vacate(self, worker: int) -> int:
        place, self._place_of[worker] = self._place_of[worker], OUTSIDE
        self._worker_at[place] = OUTSIDE
        self.losses[place % self._job.stages] += 1
        return place % self._job.stages

    def _sit(self, worker: int, place: int) -> None:
        self._place_of[worker] = place
        self._worker_at[place] = worker
        self.losses[place % self._job.stages] -= 1
