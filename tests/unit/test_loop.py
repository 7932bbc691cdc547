"""The calibration loop: every row once, out of memory halves a batch and counts nothing twice."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from hf_ptq.data.loop import choose_batch_size, run_calibration
from hf_ptq.errors import RunError
from hf_ptq.report import Report

CPU = torch.device("cpu")


class Sum:
    """Adds up token ids; what a batch added is kept only when it is committed."""

    def __init__(self) -> None:
        self.total = self.pending = 0
        self.batches: list[int] = []

    def commit(self) -> None:
        self.total, self.pending = self.total + self.pending, 0

    def discard(self) -> None:
        self.pending = 0


def forward_up_to(limit: int, record: Sum):
    def forward(batch: Mapping[str, torch.Tensor]) -> None:
        ids = batch["input_ids"]
        record.pending += int(ids.sum())  # recorded before it fails, as observers do
        if ids.shape[0] > limit:
            raise torch.OutOfMemoryError("injected")
        record.batches.append(ids.shape[0])

    return forward


def rows(count: int) -> list[torch.Tensor]:
    return [torch.full((4,), i, dtype=torch.int64) for i in range(count)]


@pytest.mark.parametrize(("limit", "batches"), [(8, [8, 3]), (4, [4, 4, 3]), (3, [2, 2, 2, 2, 2, 1]), (1, [1] * 11)])
def test_out_of_memory_halves_the_batch(limit: int, batches: list[int]) -> None:
    record, report = Sum(), Report(verbose=False)
    run_calibration(forward_up_to(limit, record), rows(11), 8, CPU, record, report)
    assert record.total == 4 * sum(range(11))
    assert record.batches == batches
    assert bool(report.warnings) == (limit < 8)


def test_one_row_that_does_not_fit_ends_the_run() -> None:
    record = Sum()
    with pytest.raises(RunError, match="--calib_seq"):
        run_calibration(forward_up_to(0, record), rows(3), 2, CPU, record, Report(verbose=False))


def test_batch_size_is_arithmetic() -> None:
    size, reason = choose_batch_size(num_rows=100, row_tokens=512, token_bytes=1 << 20, allowed_bytes=10 << 30)
    assert (size, "512 tokens" in reason) == (20, True)
    assert choose_batch_size(3, 512, 1 << 10, 80 << 30)[0] == 3
    assert choose_batch_size(1000, 8, 1, 80 << 30)[0] == 64
    assert choose_batch_size(10, 512, 1 << 30, 1 << 20)[0] == 1
