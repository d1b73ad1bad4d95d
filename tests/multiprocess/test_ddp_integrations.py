"""Autosave inside Lightning and the transformers Trainer, under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration_ranks import fit, train_gpt, train_ranks


@pytest.mark.timeout(100)
@pytest.mark.parametrize("loop", [fit, train_gpt], ids=["Lightning", "transformers"])
def test_ranks_in_anothers_loop_go_on_bit_for_bit(tmp_path: Path, loop: Callable[..., Any]) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = train_ranks(loop, tmp_path / "whole")
    assert whole[0][0] != whole[1][0], "each rank has its own data"
    assert whole[0][1] == whole[1][1], "and the same weights"
    cut = train_ranks(loop, tmp_path / "cut", stop_at=7)
    again = train_ranks(loop, tmp_path / "cut")
    for rank, (losses, weights) in enumerate(whole):
        before, (after, weights_again) = cut[rank][0], again[rank]
        assert 0 < min(after) <= max(before) + 1, "it went on from a checkpoint"
        assert before == {step: losses[step] for step in before}
        assert after == {step: losses[step] for step in after}
        assert max(after) == max(losses)
        assert weights_again == weights, f"rank {rank}"


def test_a_rank_that_comes_second_leaves_what_the_first_has_written(tmp_path: Path) -> None:
    """Found in a whole run of the tests: both ranks had seen that nothing was there, the first
    wrote it and gave it to its Trainer, and the second removed it as something older."""
    from everstep.integrations.transformers import _write_for_trainer

    (older := tmp_path / ".trainer-step-000000002").mkdir()
    target = tmp_path / ".trainer-step-000000004"
    _write_for_trainer(target, {}, "{}")
    (mark := target / "mark").touch()
    _write_for_trainer(target, {}, "{}")
    assert mark.exists()
    assert not older.exists()
    assert list(tmp_path.iterdir()) == [target]
