from __future__ import annotations

import inspect

from everstep.core import errors


def test_every_error_is_drawn_in_the_tree() -> None:
    tree = errors.__doc__ or ""
    classes = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.EverstepError)
    ]
    assert classes
    for name in classes:
        assert name in tree
