"""The calibration loop: every row once; out of memory halves a batch, and in lockstep ends the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_ptq import driver
from hf_ptq.data.loop import Lockstep, choose_batch_size, run_calibration
from hf_ptq.distributed.plan import Plan
from hf_ptq.errors import RunError
from hf_ptq.report import Report

CPU = torch.device("cpu")


class Sum:
    """Adds up token ids; what a batch added is kept only when it is committed."""

    def __init__(self) -> None:
        self.total = self.pending = self.commits = 0
        self.batches: list[int] = []
        self.firsts: list[int] = []  # the first id of each batch that went through

    def commit(self) -> None:
        self.total, self.pending = self.total + self.pending, 0
        self.commits += 1

    def discard(self) -> None:
        self.pending = 0


def forward_up_to(limit: int, record: Sum):
    def forward(batch: Mapping[str, torch.Tensor]) -> None:
        ids = batch["input_ids"]
        record.pending += int(ids.sum())  # recorded before it fails, as observers do
        if ids.shape[0] > limit:
            raise torch.OutOfMemoryError("injected")
        record.batches.append(ids.shape[0])
        record.firsts.append(int(ids[0, 0]))

    return forward


def batches_of(size: int, count: int) -> list[torch.Tensor]:
    """`count` rows of four tokens, the row's number, in batches of `size`."""
    rows = torch.arange(count)[:, None].expand(count, 4)
    return list(rows.split(size))


@pytest.mark.parametrize(("limit", "batches"), [(8, [8, 3]), (4, [4, 4, 3]), (3, [2, 2, 2, 2, 2, 1]), (1, [1] * 11)])
def test_out_of_memory_halves_the_batch(limit: int, batches: list[int]) -> None:
    record, report = Sum(), Report(verbose=False)
    run_calibration(forward_up_to(limit, record), batches_of(8, 11), CPU, record, report)
    assert record.total == 4 * sum(range(11))
    assert record.batches == batches
    assert bool(report.warnings) == (limit < 8)


def test_one_row_that_does_not_fit_ends_the_run() -> None:
    record = Sum()
    with pytest.raises(RunError, match="--calib_seq"):
        run_calibration(forward_up_to(0, record), batches_of(2, 3), CPU, record, Report(verbose=False))


# ---- in lockstep


def lockstep(forwards: int, record: Sum, idle: list[int]) -> Lockstep:
    """`idle` gets the number of forwards that were through when each idle one began."""

    @contextmanager
    def nothing_recorded() -> Iterator[None]:
        idle.append(len(record.batches))
        try:
            yield
        finally:
            record.pending = 0

    return Lockstep(forwards, nothing_recorded)


@pytest.mark.parametrize("forwards", [3, 4, 7])
def test_a_rank_out_of_data_goes_on_with_idle_forwards(forwards: int) -> None:
    record, idle, report = Sum(), [], Report(verbose=False)
    run_calibration(forward_up_to(4, record), batches_of(4, 11), CPU, record, report, lockstep(forwards, record, idle))
    assert record.total == 4 * sum(range(11)), "an idle forward adds nothing"
    assert record.firsts == [0, 4, 8] + [8] * (forwards - 3), "it repeats the last batch"
    assert idle == list(range(3, forwards)), "and idle are those alone that are not needed here"
    assert record.commits == forwards, "under expert parallelism the rows of other ranks are kept"
    assert report.warnings == []


@pytest.mark.parametrize(("limit", "sizes", "cure"), [(3, [8, 3], "--batch_size 4"), (0, [1], "lower --calib_seq")])
def test_out_of_memory_in_lockstep_ends_the_run(limit: int, sizes: list[int], cure: str) -> None:
    """A rank that halved its batch would run more forwards than the others."""
    record, idle, report = Sum(), [], Report(verbose=False)
    forward = forward_up_to(limit, record)
    with pytest.raises(RunError) as caught:
        run_calibration(forward, batches_of(sizes[0], sum(sizes)), CPU, record, report, lockstep(9, record, idle))
    (problem,) = caught.value.problems
    assert problem.what == f"out of memory in calibration with {sizes[0]} rows a batch: injected"
    assert problem.cure == cure
    assert (record.total, record.pending, record.batches, idle) == (0, 0, [], [])
    assert report.warnings == []


# ---- the batch size


def test_batch_size_is_arithmetic() -> None:
    size, reason = choose_batch_size(num_rows=100, row_tokens=512, token_bytes=1 << 20, allowed_bytes=10 << 30)
    assert size == 20
    assert reason == "512 tokens x 1.05 MB a row: 20 rows fit into the 10.7 GB that activations may take"
    assert choose_batch_size(3, 512, 1 << 10, 80 << 30)[0] == 3
    assert choose_batch_size(1000, 8, 1, 80 << 30)[0] == 64
    assert choose_batch_size(10, 512, 1 << 30, 1 << 20)[0] == 1


def test_an_exchange_of_tokens_is_reckoned(tiny: Callable[[str], Path]) -> None:
    """Hidden size 64, experts of 32, two choices, bf16; by hand from what is held at a time."""
    model = AutoModelForCausalLM.from_pretrained(tiny("qwen3_moe"), dtype=torch.bfloat16)
    for degree, routed in ((1, 2 * (5 * 64 + 5 * 32) * 2), (2, 2 * (2 * (3 * 64 + 5 * 32) + 2 * 64) * 2)):
        assert driver._token_bytes(model, 16, Plan("expert-parallel", "cpu", 0, (), 4, degree)) == 64 * 8 + routed
    four = 2 * (2 * (3 * 64 + 5 * 32) + 2 * 64) * 2
    assert driver._token_bytes(model, 16, Plan("expert-parallel", "cpu", 0, (), 4, 4)) == 64 * 8 + four, "two choices"


def test_what_is_wrong_after_the_first_batch_ends_the_loop() -> None:
    record, seen = Sum(), []

    def look() -> None:
        seen.append(record.commits)
        if len(seen) == 1:
            raise RunError("no module was called")

    with pytest.raises(RunError, match="no module was called"):
        run_calibration(forward_up_to(8, record), batches_of(2, 6), CPU, record, Report(verbose=False), None, look)
    assert (seen, record.commits) == ([1], 1)
    run_calibration(forward_up_to(8, record), batches_of(2, 6), CPU, record, Report(verbose=False), None, look)
    assert (seen, record.commits) == ([1, 2], 4)
