"""Whatever is recorded is read back bit for bit or not at all, from memory and from disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep.comm.framing import DTYPE_BYTES
from everstep.comm.streams import host_copy, memory_of
from everstep.core.errors import LogCorrupt, LogEntryMissing
from everstep.membership.facts import LogDirection
from everstep.recovery.log import BoundaryLog, LogKey
from everstep.recovery.log_record import RecordBroken, decode_record, encode_record

SETTLE_S = 30.0
ENTRY_BYTES = 100
BOUND_BYTES = 2000
KEY = LogKey(7, 2, 3, 1, LogDirection.BACKWARD)

sizes = st.integers(0, 4)
numbers = st.integers(0, 3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any type and shape, zero dimensions and zero elements too, with any bits; some are not
    contiguous."""
    dtype = getattr(torch, draw(st.sampled_from(sorted(DTYPE_BYTES))))
    shape = draw(st.lists(sizes, max_size=4))
    tensor = torch.empty(shape, dtype=dtype)
    seed = draw(st.integers(0, 1 << 30))
    if tensor.nbytes:
        highest = 2 if dtype is torch.bool else 256
        bits = torch.randint(
            highest, (tensor.nbytes,), generator=torch.Generator().manual_seed(seed)
        )
        memory_of(tensor)[:] = bytes(bits.tolist())
    is_turned, is_thinned, is_conjugate = draw(st.tuples(*[st.booleans()] * 3))
    if shape and is_turned:
        tensor = tensor.transpose(0, -1)
    if shape and is_thinned:
        tensor = tensor[..., ::2]
    if dtype.is_complex and is_conjugate:
        tensor = tensor.conj()
    return tensor


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    plain = host_copy(tensor)
    return plain.dtype, tuple(plain.shape), bytes(memory_of(plain)) if plain.nbytes else b""


@contextmanager
def opened(*, memory_bytes: int = BOUND_BYTES) -> Iterator[tuple[BoundaryLog, Path]]:
    with (
        tempfile.TemporaryDirectory() as directory,
        BoundaryLog(
            Path(directory),
            memory_bytes=memory_bytes,
            budget_bytes=1 << 30,
            on_warning=pytest.fail,
        ) as log,
    ):
        yield log, Path(directory)


@given(st.lists(tensors(), max_size=4), st.text())
def test_a_record_holds_the_very_bits(sent: list[torch.Tensor], structure: str) -> None:
    parts = encode_record(KEY, [host_copy(tensor) for tensor in sent], structure)
    found, said = decode_record(memoryview(b"".join(parts)), KEY)
    assert [bits(tensor) for tensor in found] == [bits(tensor) for tensor in sent]
    assert said == structure


@given(st.lists(st.lists(tensors(), max_size=3), min_size=1, max_size=6))
def test_what_was_spilled_is_what_was_recorded(messages: list[list[torch.Tensor]]) -> None:
    filler = LogKey(99, 1, 0, 0, LogDirection.FORWARD)
    with opened(memory_bytes=BOUND_BYTES) as (log, directory):
        for step, sent in enumerate(messages):
            log.record(LogKey(step, 1, 0, 0, LogDirection.FORWARD), sent, f"of {step}")
        log.wait_settled(timeout_s=SETTLE_S)
        # As much as may be in memory at all: everything older goes to disk.
        log.record(filler, [torch.zeros(BOUND_BYTES, dtype=torch.uint8)], "")
        log.wait_settled(timeout_s=SETTLE_S)
        assert log.report().disk_bytes > 0 or not any(t.nbytes for sent in messages for t in sent)
        for step, sent in enumerate(messages):
            found, structure = log.read(LogKey(step, 1, 0, 0, LogDirection.FORWARD))
            assert [bits(tensor) for tensor in found] == [bits(tensor) for tensor in sent]
            assert structure == f"of {step}"
        assert directory.exists()


records = st.tuples(
    st.just("record"), numbers, st.integers(0, 1), numbers, st.sampled_from(LogDirection)
)
commands = st.one_of(
    records,
    records,
    records,
    st.tuples(
        st.just("replay"), numbers, st.integers(0, 1), numbers, st.just(LogDirection.FORWARD)
    ),
    st.tuples(st.just("collect"), numbers),
    st.tuples(st.just("settle")),
    st.tuples(st.just("check")),
)


class Model:
    """What a log must hold, as a plain dict."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int, LogDirection, int], tuple[int, int]] = {}
        self._closed: list[tuple[int, int]] = []
        self._newest = -1

    def record(self, key: LogKey, value: int, *, replace: bool) -> None:
        if any(key.step <= step and key.attempt <= attempt for step, attempt in self._closed):
            return
        slot = key.step, key.boundary, key.direction, key.microbatch
        if slot in self.held and not replace:
            return
        self.held[slot] = key.attempt, value
        self._newest = max(self._newest, key.attempt)

    def collect(self, last: int) -> None:
        self.held = {slot: held for slot, held in self.held.items() if slot[0] > last}
        self._closed.append((last, self._newest))

    def keys(self) -> dict[LogKey, int]:
        return {
            LogKey(step, attempt, microbatch, boundary, direction): value
            for (step, boundary, direction, microbatch), (attempt, value) in self.held.items()
        }


def check(log: BoundaryLog, model: Model) -> None:
    offered = {
        LogKey(step, run.attempt, microbatch, run.boundary, run.direction)
        for run in log.runs()
        for step in range(run.first_step, run.last_step + 1)
        for microbatch in run.microbatches
    }
    assert offered == set(model.keys())
    for key, value in model.keys().items():
        [found], structure = log.read(key)
        assert set(found.tolist()) == {value}
        assert structure == str(value)
        with pytest.raises(LogEntryMissing):
            log.read(LogKey(key.step, key.attempt + 1, key.microbatch, key.boundary, key.direction))


@given(st.lists(commands, max_size=35))
def test_any_order_of_recording_collecting_and_spilling_is_as_a_plain_dict(
    script: list[tuple[object, ...]],
) -> None:
    """At most 35 entries of 100 bytes: memory is over its bound of 2000 and never over twice."""
    model = Model()
    with opened() as (log, directory):
        for number, command in enumerate(script):
            match command:
                case ("record" | "replay" as how, int(low), int(boundary), int(microbatch), where):
                    assert isinstance(where, LogDirection)
                    # Later attempts go on from later steps, and back a little.
                    attempt = number // 12
                    key = LogKey(low + 2 * attempt, attempt, microbatch, boundary, where)
                    sent = torch.full((ENTRY_BYTES,), number, dtype=torch.uint8)
                    log.record(key, [sent], str(number), replace=how == "record")
                    model.record(key, number, replace=how == "record")
                case ("collect", int(step)):
                    log.collect(step)
                    model.collect(step)
                case ("settle",):
                    log.wait_settled(timeout_s=SETTLE_S)
                    assert log.report().memory_bytes <= BOUND_BYTES
                case _:
                    check(log, model)
        check(log, model)
        log.wait_settled(timeout_s=SETTLE_S)
        check(log, model)
        assert log.report().dropped_steps == 0
        log.collect(1000)
        log.wait_settled(timeout_s=SETTLE_S)
        assert log.report().memory_bytes == log.report().disk_bytes == 0
        assert not list(directory.rglob("*.segment"))


@given(st.data())
def test_any_flipped_bit_of_a_file_is_noticed_and_its_entry_no_longer_offered(
    data: st.DataObject,
) -> None:
    with opened(memory_bytes=100) as (log, directory):
        keys = [LogKey(1, 1, microbatch, 0, LogDirection.FORWARD) for microbatch in range(3)]
        for key in keys:
            sent = torch.full((15,), key.microbatch, dtype=torch.float64)
            log.record(key, [sent], "structure")
            log.wait_settled(timeout_s=SETTLE_S)
        [file] = directory.rglob("*.segment")
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        [hit] = {at * 3 // len(content)}
        for key in keys:
            if key.microbatch == hit:
                with pytest.raises(LogCorrupt):
                    log.read(key)
                with pytest.raises(LogEntryMissing):
                    log.read(key)
            else:
                assert log.read(key)[0][0].tolist() == [float(key.microbatch)] * 15
        assert [run.microbatches for run in log.runs()] == [
            tuple(key.microbatch for key in keys if key.microbatch != hit)
        ]


@given(st.integers(0, 400))
def test_a_file_that_was_cut_off_is_noticed(left_bytes: int) -> None:
    parts = encode_record(KEY, [torch.arange(20)], "x")
    whole = b"".join(parts)
    cut = whole[: min(left_bytes, len(whole) - 1)]
    with pytest.raises(RecordBroken):
        decode_record(memoryview(cut), KEY)


def test_the_record_of_another_entry_is_noticed() -> None:
    whole = b"".join(encode_record(KEY, [torch.arange(20)], "x"))
    with pytest.raises(RecordBroken, match="it is the record of step 7"):
        decode_record(memoryview(whole), LogKey(8, 2, 3, 1, LogDirection.BACKWARD))
