"""The calibration loop: batches through the model, statistics committed batch by batch.

The batch size is chosen by memory arithmetic. If memory runs out all the same, a single process halves the batch,
repeats it and says so; what the failed batch had recorded is discarded. Ranks that share a model cannot do that: their
forwards must stay equal in number. For that a rank that is out of batches repeats its last one, marked as idle.

The loop does not know what is recorded, nor what idle means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hf_ptq.errors import Problem, RunError
from hf_ptq.report import Report
from hf_ptq.sizes import human_bytes

Forward = Callable[[Mapping[str, torch.Tensor]], Any]
MAX_BATCH_ROWS = 64


class Recorder(Protocol):
    """What is recorded during a batch: kept when the batch finished, dropped when it failed."""

    def commit(self) -> None:
        """Keep the batch."""

    def discard(self) -> None:
        """Drop the batch."""


def choose_batch_size(num_rows: int, row_tokens: int, token_bytes: int, allowed_bytes: int) -> tuple[int, str]:
    """(rows per batch, the arithmetic in words): what fits into the memory allowed, at most 64 rows.

    `token_bytes`: the largest activations that one token needs at a time.
    """
    fitting = max(1, allowed_bytes // max(1, row_tokens * token_bytes))
    size = max(1, min(num_rows, fitting, MAX_BATCH_ROWS))
    reason = (
        f"{row_tokens} tokens x {human_bytes(token_bytes)} a row: {fitting} rows fit into the "
        f"{human_bytes(allowed_bytes)} that activations may take"
    )
    return size, reason


@dataclass(frozen=True)
class Lockstep:
    """What ranks that run forwards together agree on: their number, and what to do in one that is not needed here."""

    forwards: int
    idle: Callable[[], AbstractContextManager[object]]


@torch.no_grad()
def run_calibration(
    forward: Forward,
    batches: Sequence[torch.Tensor],
    device: torch.device,
    recorder: Recorder,
    report: Report,
    lockstep: Lockstep | None = None,
    after_first: Callable[[], None] = lambda: None,
) -> None:
    """Run every batch [rows, tokens] (int64 on the CPU) once, and idle ones until there were `lockstep.forwards`.

    `after_first` is called when one batch is recorded: what it raises ends the loop before the others cost anything.

    Raises RunError when not even one row fits into memory, in lockstep when a batch does not.
    """
    with report.progress("calibrate", sum(batch.numel() for batch in batches), "tokens") as advance:
        queue, is_first = list(batches)[::-1], True
        while queue:
            batch = queue.pop()
            try:
                forward({"input_ids": batch.to(device, non_blocking=True)})
            except (torch.OutOfMemoryError, MemoryError) as error:
                recorder.discard()
                if lockstep is not None:
                    raise _too_large(batch, error) from error
                queue += _halve(batch, queue, error, report)
                continue
            recorder.commit()
            advance(batch.numel())
            if is_first:
                after_first()
                is_first = False
        for _ in range(lockstep.forwards - len(batches) if lockstep else 0):
            try:
                with lockstep.idle():  # type: ignore[union-attr]
                    forward({"input_ids": batches[-1].to(device, non_blocking=True)})
            except (torch.OutOfMemoryError, MemoryError) as error:
                raise _too_large(batches[-1], error) from error
            recorder.commit()


def _too_large(batch: torch.Tensor, error: BaseException) -> RunError:
    rows = batch.shape[0]
    smaller = f"--batch_size {rows // 2}" if rows > 1 else "lower --calib_seq"
    return RunError(Problem(f"out of memory in calibration with {rows} rows a batch: {error}", smaller))


def _halve(batch: torch.Tensor, queue: list[torch.Tensor], error: BaseException, report: Report) -> list[torch.Tensor]:
    """The batch in two halves, in the order in which they are popped; batches still to come are halved as well."""
    rows = batch.shape[0]
    if rows == 1:
        raise RunError(
            Problem(
                f"out of memory in calibration with one row of {batch.shape[1]} tokens: {error}",
                "lower --calib_seq or use a device with more memory",
            )
        ) from error
    size = (rows + 1) // 2
    report.warn(f"out of memory with {rows} rows a batch; the batch is repeated with {size} (--batch_size {size})")
    torch.cuda.empty_cache()
    queue[:] = [half for later in queue for half in reversed(later.split(size))]
    return list(reversed(batch.split(size)))
