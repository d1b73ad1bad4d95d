from __future__ import annotations

from math import comb
from pathlib import Path

from everstep.core.ids import WorkerId
from everstep.schedule.check import check
from everstep.schedule.store import PlanStore, canonical, losses_to_prepare
from problems import problem


def test_a_prepared_plan_is_read_back_from_disk(tmp_path: Path) -> None:
    question = problem((3, 4, 6), [(2, 1)])
    made = PlanStore(tmp_path).plan(question)
    later = PlanStore(tmp_path)
    assert later.has(question)
    assert later.plan(question) == made


def test_losses_that_differ_in_the_names_of_replicas_share_a_plan(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    for replica in range(3):
        made = store.plan(problem((3, 4, 6), [(replica, 1)]))
        assert made.problem.lost == {WorkerId(replica, 1)}
        assert check(made) == []
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_file_is_planned_again(tmp_path: Path) -> None:
    question = problem((3, 4, 6), [(0, 1)])
    made = PlanStore(tmp_path).plan(question)
    (path,) = tmp_path.iterdir()
    for damage in ("{", "{}", path.read_text().replace('"kind":"F"', '"kind":"B"', 1)):
        path.write_text(damage)
        assert PlanStore(tmp_path).plan(question) == made


def test_another_problem_never_finds_the_plan(tmp_path: Path) -> None:
    PlanStore(tmp_path).plan(problem((3, 4, 6), [(0, 1)]))
    assert not PlanStore(tmp_path).has(problem((3, 4, 6), [(0, 1)], in_flight=(4,) * 4))


def test_prepared_losses_cover_all_losses() -> None:
    shape = problem((4, 3, 2))
    prepared = set(losses_to_prepare(shape, at_most=2))
    workers = [(r, s) for r in range(4) for s in range(3)]
    pairs = [(one, other) for one in workers for other in workers if one < other]
    assert len(pairs) == comb(12, 2)
    for lost in [(), *[(worker,) for worker in workers], *pairs]:
        assert canonical(problem((4, 3, 2), lost))[0] in prepared


def test_losses_that_leave_a_stage_empty_are_not_prepared() -> None:
    for question in losses_to_prepare(problem((2, 2, 2)), at_most=3):
        assert all(question.live(stage) for stage in range(2))
