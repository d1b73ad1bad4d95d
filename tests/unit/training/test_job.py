from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import everstep
from bad_job import BAD_JOBS, good
from everstep.core.errors import ConfigError
from everstep.execute.split import split_model
from everstep.recovery.undo import Keep
from everstep.training.job import check_optimizer, check_shape, digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": nn.Linear(8, 2)}, "model is a Linear: must be a function that builds it"),
        ({"model": 3}, "model is a int: must be a function"),
        ({"loss": "mse"}, "loss is a str: must be a function"),
        ({"optimizer": None}, "optimizer is a NoneType: must be a function"),
        ({"microbatches": 0}, "microbatches is 0: must be a whole number, at least 1"),
        ({"microbatches": 2.0}, "microbatches is 2.0: must be a whole number"),
        ({"batch_size": -4}, "batch_size is -4: must be a whole number, at least 1"),
        ({"dataset": iter([])}, "dataset is a list_iterator: must be map-style"),
        ({"clip_norm": 0}, "clip_norm is 0: must be above 0"),
        ({"clip_norm": float("nan")}, "clip_norm is nan: must be above 0"),
        ({"clip_mode": "sometimes"}, "clip_mode is sometimes: must be synchronous or"),
        ({"keep": "some"}, "keep is some: must be nothing or missing or everything"),
        ({"precision": "fp16"}, "precision is fp16: must be None or 'bf16'"),
    ],
)
def test_a_field_that_breaks_its_rule_is_named_with_its_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        good(**changes)
    assert str(caught.value).startswith(message)


def test_choices_may_be_given_as_plain_strings() -> None:
    """`keep="nothing"` once passed for copies being kept: AMSGrad was then accepted, and could not
    be undone; an unknown `clip_mode` was a ValueError of the enum, without the field.
    """
    job = good(clip_norm=1.0, clip_mode="post-validated", keep="nothing")
    assert job.clip_mode is everstep.ClipMode.POST_VALIDATED
    assert job.keep is Keep.NOTHING


def test_a_batch_must_be_cut_into_equal_slices() -> None:
    job = good(batch_size=18, microbatches=3)
    check_shape(job, replicas=2)
    with pytest.raises(ConfigError) as caught:
        check_shape(job, replicas=4)
    assert str(caught.value) == (
        "batch_size is 18: must be a multiple of 12 (4 replicas x 3 micro-batches), such as 24"
    )


def test_the_batch_size_that_is_proposed_is_one_that_works() -> None:
    for batch_size in range(1, 40):
        try:
            check_shape(good(batch_size=batch_size, microbatches=4), replicas=2)
        except ConfigError as error:
            proposed = int(error.rule.rpartition(" ")[2])
            check_shape(good(batch_size=proposed, microbatches=4), replicas=2)


def test_a_dataset_must_hold_one_batch() -> None:
    with pytest.raises(ConfigError) as caught:
        check_shape(BAD_JOBS["short dataset"](), replicas=1)
    assert str(caught.value) == "dataset is 200 samples long: must hold at least one batch of 204"


def test_an_optimizer_that_cannot_be_undone_is_named_with_the_reason_and_what_to_do() -> None:
    job = BAD_JOBS["amsgrad"]()
    with pytest.raises(ConfigError) as caught:
        everstep.train(job, steps=1)
    message = str(caught.value)
    assert message.startswith("optimizer is AdamW: its step cannot be undone: ")
    assert "amsgrad" in message
    assert "give the job keep=everstep.Keep.MISSING" in message


def test_keeping_copies_allows_every_optimizer() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), amsgrad=True)
    check_optimizer(good(keep=Keep.MISSING), optimizer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few layers", "num_stages is 3: must be at most 2, the number of layers of the model"),
        ("no split", "model is a Forked: with 3 stages it must be an nn.Sequential, or split="),
        ("tied", "model is tied: 0.weight (stage 0) is 2.weight (stage 2): a parameter must"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_rule(name: str, message: str) -> None:
    job = BAD_JOBS[name]()
    with pytest.raises(ConfigError) as caught:
        split_model(job.model(), num_stages=3, example=torch.ones(4, 8), split=job.split)
    assert str(caught.value).startswith(message)


def test_in_flight_limits_are_one_number_or_one_per_stage() -> None:
    assert good().in_flight_limits(3) is None
    assert good(in_flight=4).in_flight_limits(3) == (4, 4, 4)
    assert good(in_flight=[3, 2, 1]).in_flight_limits(3) == (3, 2, 1)
    with pytest.raises(ConfigError, match=r"in_flight is \[3, 2\]: must have one number per stage"):
        good(in_flight=[3, 2]).in_flight_limits(3)


def test_the_digest_tells_jobs_apart_that_must_not_train_together() -> None:
    def digest_of(job: everstep.Job) -> str:
        stages = split_model(job.model(), num_stages=2, example=torch.ones(4, 8))
        return digest(job, stages, backend=job.backend or "gloo")

    same = digest_of(good())
    assert digest_of(good()) == same
    others = [
        good(shuffle=False),
        good(precision="bf16"),
        good(device="cuda"),
        good(device="cuda", backend="nccl"),
        good(dataset=range(16)),
        good(metrics={"accuracy": lambda _, __: 0.0}),
        good(model=lambda: nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 2))),
    ]
    digests = {digest_of(job) for job in others}
    assert len(digests) == len(others)
    assert same not in digests
