"""Writing tensors into files whose layout is already known, by threads, in any order.

The idea: `shards.lay_out` fixed where each tensor's bytes go, so writing one is a `pwrite` at its offset and nothing
else: no tensor waits for another, nothing is kept until a shard is full, and the files have their size and header
from the first moment. Ranks share one layout without asking each other; each writes the files that are its own.

How: tensors are handed to a pool of threads in batches of a few MB (a hand-over per tensor would cost more than
writing a small one) and written piece by piece. `write` blocks while more than `max_queued_bytes` wait. A CUDA tensor
is copied by the thread that writes it, after an event of the caller's stream. Small CUDA tensors are cheap as a stack
only (`write_stack`): one copy serves all.

Each tensor's CRC-32 is taken from memory on the way to the file; verification compares it with what the file holds.

This file does not know what the tensors mean, nor when the checkpoint is complete: see export/verify.py.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from hf_ptq.checkpoint.dtypes import SAFETENSORS_DTYPES
from hf_ptq.checkpoint.shard_file import ShardFile, write_all, write_failed
from hf_ptq.checkpoint.shards import ShardPlan, TensorPlan
from hf_ptq.checkpoint.tensor_bytes import CudaStaging, cpu_pieces, file_pieces
from hf_ptq.errors import Problem, RunError

BATCH_BYTES = 8 << 20  # what is handed to a thread at a time,
BATCH_TENSORS = 512  # or so many small ones
STACK_BYTES = 16 << 20  # of a stack in one job
PINNED_BYTES = 16 << 20  # of each thread, for CUDA tensors
MAX_NAMED = 20  # tensor names in one message


class ShardWriter:
    """Writes the tensors of a layout into `directory`, which exists; use it as a context manager.

    `shards`: the files that this writer is responsible for. Leaving the `with` block before `finish` has returned drops
    what is queued and closes the files (`abort`). `fsync_seconds` is set by `finish`.
    """

    def __init__(
        self,
        directory: Path,
        shards: Sequence[ShardPlan],
        threads: int = 4,
        max_queued_bytes: int = 256 << 20,
    ) -> None:
        self.fsync_seconds = 0.0
        self._max_queued = max_queued_bytes
        self._files: list[ShardFile] = []
        self._pending: dict[str, tuple[ShardFile, TensorPlan]] = {}
        self._checksums: dict[str, int] = {}
        self._twice: list[str] = []
        self._queued = 0
        self._batch: list[_Job] = []
        self._batch_bytes = 0
        self._max_batch_bytes = min(BATCH_BYTES, max_queued_bytes // threads)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self._staging = CudaStaging(min(PINNED_BYTES, max(1, max_queued_bytes // threads)))
        for folder in {Path(shard.file).parent for shard in shards} - {Path()}:
            (directory / folder).mkdir(exist_ok=True)
        for shard in shards:
            file = ShardFile(directory / shard.file, shard)
            file.create()
            self._files.append(file)
            self._pending.update((t.name, (file, t)) for t in shard.tensors)
        self._own = frozenset(self._pending)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shard-writer")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Queue one tensor, on the CPU or a CUDA device, contiguous or not; it must not be changed afterwards.

        Blocks while too many bytes are waiting. Raises RunError if the tensor is not the planned one (dtype, shape, a
        meta tensor) or if any earlier write has failed.
        """
        self._write((name,), tensor[None])

    def write_stack(self, names: Sequence[str], stack: torch.Tensor) -> None:
        """Queue `stack[i]` as the tensor `names[i]`, for all i: the tensors of all experts of a layer in one call.

        The stack goes to the host in few large copies, and tensors that lie side by side in the file are written
        together. Otherwise as `write`. ValueError if there are not as many names as tensors.
        """
        if len(names) != stack.shape[0]:
            raise ValueError(f"{len(names)} names for a stack of {stack.shape[0]} tensors, the first {names[:1]}")
        self._write(names, stack)

    def _write(self, names: Sequence[str], stack: torch.Tensor) -> None:
        self._raise_error()
        if not names:
            return
        found = (SAFETENSORS_DTYPES.get(stack.dtype, str(stack.dtype)), tuple(stack.shape[1:]))
        places: list[tuple[ShardFile, TensorPlan]] = []
        for name in names:
            place = self._claim(name)
            if place is None:
                return
            plan = place[1]
            if found != (plan.dtype, plan.shape) or stack.device.type == "meta":
                raise RunError(
                    f"{name}: the layout has {plan.dtype} {list(plan.shape)}, "
                    f"the tensor to write is {found[0]} {list(found[1])} on device {stack.device}"
                )
            places.append(place)
        ready = None
        if stack.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(stack.device))
        step = max(1, STACK_BYTES // max(1, places[0][1].num_bytes))
        for start in range(0, len(places), step):
            part = stack[start : start + step].detach()
            pieces = cpu_pieces(part) if ready is None else self._staging.pieces(part, ready)
            here = places[start : start + step]
            self._queue(_Job(_runs(here), pieces, sum(plan.num_bytes for _, plan in here)))

    def copy(self, name: str, path: Path, offset: int) -> None:
        """Queue the copy of one tensor's bytes from `path` at `offset`; they are taken as they are, unseen."""
        self._raise_error()
        place = self._claim(name)
        if place is not None:
            file, plan = place
            self._queue(_Job(_runs([(file, plan)]), file_pieces(path, offset, plan.num_bytes), 0))

    def finish(self, durable: bool) -> dict[str, int]:
        """Wait for all writes; `durable` also flushes the files to the disk. Returns the CRC-32 of each tensor.

        Raises RunError for a failed write, and one naming the tensors that were never written or written twice.
        """
        self._raise_error()
        self._submit()
        self._pool.shutdown(wait=True)
        self._raise_error()
        missing, twice = list(self._pending), self._twice
        if missing or twice:
            raise RunError(*_count("never written", missing), *_count("written twice", twice))
        start = time.perf_counter()
        if durable:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(ShardFile.flush, self._files))
        self.fsync_seconds = time.perf_counter() - start
        self._stopped = True
        return dict(self._checksums)

    def abort(self) -> None:
        """Drop what is queued, wait for the piece each thread is at, close the files. Harmless after `finish`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files:
            file.close()

    def _claim(self, name: str) -> tuple[ShardFile, TensorPlan] | None:
        """The place of a tensor that has not been written; None (and a note for `finish`) if it has been."""
        if name not in self._own:
            raise RunError(f"{name}: not among the tensors that this writer was to write")
        with self._changed:
            place = self._pending.pop(name, None)
            if place is None:
                self._twice.append(name)
        return place

    def _queue(self, job: _Job) -> None:
        """Add a tensor to the batch; hand the batch over when it is full or when too much memory is held."""
        with self._changed:
            full = self._queued + job.held_bytes > self._max_queued
            if full:
                self._submit()
                # A tensor larger than the limit passes when it is alone.
                self._changed.wait_for(
                    lambda: self._stopped or not self._queued or self._queued + job.held_bytes <= self._max_queued
                )
                self._raise_error()
            self._queued += job.held_bytes
            self._batch.append(job)
            self._batch_bytes += job.num_bytes
            if self._batch_bytes >= self._max_batch_bytes or len(self._batch) >= BATCH_TENSORS:
                self._submit()

    def _submit(self) -> None:
        """Hand the batch to the threads."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if batch:
            future = self._pool.submit(self._run, batch)
            held_bytes = sum(job.held_bytes for job in batch)
            future.add_done_callback(lambda done: self._settle(done, held_bytes))

    def _settle(self, done: Future[None], held_bytes: int) -> None:
        """Called in the thread that finished a batch: give its bytes back, keep the first error."""
        with self._changed:
            self._queued -= held_bytes
            if not done.cancelled() and self._error is None:
                self._error = done.exception()
                self._stopped = self._stopped or self._error is not None
            self._changed.notify_all()

    def _run(self, batch: Sequence[_Job]) -> None:
        """In a thread: write the tensors of a batch; nothing more once another tensor has failed."""
        for job in batch:
            if self._stopped:
                return
            self._store(job)

    def _store(self, job: _Job) -> None:
        """Write the tensors of a job; a piece may hold several of them, or a part of one."""
        pieces = job.pieces
        piece = memoryview(b"")
        for run in job.runs:
            descriptor, position, left = run.file.open(), run.position, run.num_bytes
            sums = _Checksums(run.tensors)
            while left:
                if not piece:
                    piece = next(pieces)
                if self._stopped:
                    return
                part, piece = piece[:left], piece[left:]
                sums.add(part)
                try:
                    position = write_all(descriptor, part, position)
                except OSError as error:
                    raise write_failed(run.file.path, run.tensors[0].name, error) from error
                left -= len(part)
            self._checksums.update(sums.finish())
            run.file.done_with(len(run.tensors))

    def _raise_error(self) -> None:
        """Raise what a thread ran into."""
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise RunError("the writer was closed before all tensors were written")


@dataclass(frozen=True)
class _Run:
    """Tensors that lie side by side in one file, from `position` on."""

    file: ShardFile
    position: int
    tensors: tuple[TensorPlan, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def _runs(places: Sequence[tuple[ShardFile, TensorPlan]]) -> tuple[_Run, ...]:
    """The tensors in their order, cut where the next one does not follow the last in its file."""
    runs: list[tuple[ShardFile, list[TensorPlan]]] = []
    end: tuple[ShardFile, int] | None = None
    for file, plan in places:
        position = file.plan.offsets[plan.name]
        if end != (file, position):
            runs.append((file, []))
        runs[-1][1].append(plan)
        end = file, position + plan.num_bytes
    return tuple(_Run(file, file.plan.offsets[plans[0].name], tuple(plans)) for file, plans in runs)


@dataclass(frozen=True)
class _Job:
    """Tensors to write: their bytes come piece by piece, made in the writing thread; `held_bytes` wait in memory."""

    runs: tuple[_Run, ...]
    pieces: Iterator[memoryview]
    held_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(run.num_bytes for run in self.runs)


class _Checksums:
    """CRC-32 of each of several tensors, whose bytes come one after the other in pieces of any size."""

    def __init__(self, tensors: Sequence[TensorPlan]) -> None:
        self._sums = dict.fromkeys((tensor.name for tensor in tensors), 0)
        self._ahead = [(tensor.name, tensor.num_bytes) for tensor in reversed(tensors)]

    def add(self, piece: memoryview) -> None:
        """The next bytes."""
        while piece:
            name, left = self._ahead.pop()
            part, piece = piece[:left], piece[left:]
            self._sums[name] = zlib.crc32(part, self._sums[name])
            if len(part) < left:
                self._ahead.append((name, left - len(part)))

    def finish(self) -> dict[str, int]:
        """Name -> checksum; an empty tensor has that of no bytes."""
        return self._sums


def _count(what: str, names: Sequence[str]) -> list[Problem]:
    """One problem for all tensors of a kind, none if there are none."""
    if not names:
        return []
    shown = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    return [Problem(f"{len(names)} planned tensors {what}: {shown}")]
