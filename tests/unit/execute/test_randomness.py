from __future__ import annotations

import torch

from everstep.execute.randomness import keyed_randomness, seed_for

CPU = torch.device("cpu")


def test_the_seed_is_the_same_in_every_process() -> None:
    assert seed_for(0, 0, 0, 0, 0) == 5017201537119596366
    assert seed_for(7, 1, 2, 3, 4) == seed_for(7, 1, 2, 3, 4)


def test_every_part_of_the_key_matters() -> None:
    base = [1, 1, 1, 1, 1]
    keys = [tuple(base), *((*base[:i], 2, *base[i + 1 :]) for i in range(5))]
    assert len({seed_for(*key) for key in keys}) == 6
    assert seed_for(1, 11, 1, 1, 1) != seed_for(11, 1, 1, 1, 1)


def test_the_global_generator_goes_on_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with keyed_randomness(9, device=CPU):
        inside = torch.rand(2)
    assert torch.equal(torch.rand(2), expected)
    with keyed_randomness(9, device=CPU):
        assert torch.equal(torch.rand(2), inside)


def test_the_generator_is_restored_after_an_error() -> None:
    torch.manual_seed(3)
    expected = torch.default_generator.get_state()
    try:
        with keyed_randomness(9, device=CPU):
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.default_generator.get_state(), expected)
