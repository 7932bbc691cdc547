"""Writing tensors into files whose layout is already known, by threads, in any order.

The idea: `shards.lay_out` fixed where each tensor's bytes go, so writing one is a `pwrite` at its offset and nothing
else: no tensor waits for another, nothing is kept until a shard is full, and the files have their size and header
from the first moment. Opening and sizing a file does the same whoever does it, so ranks may share one layout without
asking each other; each then names the tensors it will write.

How: tensors are handed to a pool of threads in batches of a few MB (a hand-over per tensor would cost more than
writing a small one) and written in pieces that stay in the processor's cache between the checksum and the write.
`write` blocks while more than `max_queued_bytes` wait. A CUDA tensor is copied by the thread that writes it: on that
thread's own stream, after an event of the caller's stream, through that thread's one pinned buffer, so pinned memory
is bounded by construction.

Each tensor's CRC-32 is taken from memory on the way to the file; verification compares it with what the file holds.

This file does not know what the tensors mean, nor when the checkpoint is complete: see export/verify.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from hf_ptq.checkpoint.dtypes import SAFETENSORS_DTYPES
from hf_ptq.checkpoint.shards import ShardPlan, TensorPlan
from hf_ptq.errors import Problem, RunError

PIECE_BYTES = 4 << 20  # one checksum-and-write step
BATCH_BYTES = 8 << 20  # what is handed to a thread at a time,
BATCH_TENSORS = 512  # or so many small ones
MAX_NAMED = 20  # tensor names in one message
CURES: dict[int | None, str] = {
    errno.ENOSPC: "free room there, or take another --export_path",
    errno.EDQUOT: "free room in that quota, or take another --export_path",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or --max_shard_size",
}


class ShardWriter:
    """Writes the tensors of a layout into `directory`, which exists; use it as a context manager.

    `names`: the tensors this writer is responsible for; None means all. Files that hold none of them are not touched.
    Leaving the `with` block before `finish` has returned drops what is queued and closes the files (`abort`).
    `fsync_seconds` is set by `finish`.
    """

    def __init__(
        self,
        directory: Path,
        shards: Sequence[ShardPlan],
        threads: int = 4,
        max_queued_bytes: int = 256 << 20,
        names: Collection[str] | None = None,
    ) -> None:
        self.fsync_seconds = 0.0
        self._max_queued = max_queued_bytes
        self._files: list[_File] = []
        self._pending: dict[str, tuple[_File, TensorPlan]] = {}
        self._checksums: dict[str, int] = {}
        self._twice: list[str] = []
        self._queued = 0
        self._batch: list[_Job] = []
        self._batch_bytes = 0
        self._max_batch_bytes = min(BATCH_BYTES, max_queued_bytes // threads)
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self._staging = _Staging(min(PIECE_BYTES * 4, max(1, max_queued_bytes // threads)))
        wanted = None if names is None else set(names)
        for shard in shards:
            own = [t for t in shard.tensors if wanted is None or t.name in wanted]
            if own:
                file = _File(directory / shard.file, shard, len(own))
                file.create()
                self._files.append(file)
                self._pending.update((t.name, (file, t)) for t in own)
        self._own = frozenset(self._pending)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shard-writer")

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Queue one tensor, on the CPU or a CUDA device, contiguous or not; it must not be changed afterwards.

        Blocks while too many bytes are waiting. Raises RunError if the tensor is not the planned one (dtype, shape, a
        meta tensor) or if any earlier write has failed. Many small tensors are cheap on the CPU only: copy the scales
        of a CUDA model to the host in one transfer.
        """
        self._raise_error()
        place = self._claim(name)
        if place is None:
            return
        file, plan = place
        found = (SAFETENSORS_DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        if found != (plan.dtype, plan.shape) or tensor.device.type == "meta":
            raise RunError(
                f"{name}: the layout has {plan.dtype} {list(plan.shape)}, "
                f"the tensor to write is {found[0]} {list(found[1])} on device {tensor.device}"
            )
        if tensor.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(tensor.device))
            self._queue(_Job(file, plan, self._staging.pieces(tensor.detach(), ready), plan.num_bytes))
        else:
            self._queue(_Job(file, plan, _pieces(tensor), plan.num_bytes))

    def copy(self, name: str, path: Path, offset: int) -> None:
        """Queue the copy of one tensor's bytes from `path` at `offset`; they are taken as they are, unseen."""
        self._raise_error()
        place = self._claim(name)
        if place is not None:
            file, plan = place
            self._queue(_Job(file, plan, _file_pieces(path, offset, plan.num_bytes), 0))

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
                list(pool.map(_File.flush, self._files))
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

    def _claim(self, name: str) -> tuple[_File, TensorPlan] | None:
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
            self._batch_bytes += job.plan.num_bytes
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
        """Write one tensor piece by piece."""
        position, checksum = job.file.plan.offsets[job.plan.name], 0
        descriptor = job.file.open()
        for piece in job.pieces:
            if self._stopped:
                return
            checksum = zlib.crc32(piece, checksum)
            try:
                position = _write_all(descriptor, piece, position)
            except OSError as error:
                raise _write_failed(job.file.path, job.plan.name, error) from error
        self._checksums[job.plan.name] = checksum
        job.file.done_with_one()

    def _raise_error(self) -> None:
        """Raise what a thread ran into."""
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise RunError("the writer was closed before all tensors were written")


@dataclass(frozen=True)
class _Job:
    """One tensor to write: its bytes come piece by piece, made in the writing thread; `held_bytes` wait in memory."""

    file: _File
    plan: TensorPlan
    pieces: Iterator[memoryview]
    held_bytes: int


class _File:
    """One shard: created at once, opened by the first of its tensors, closed by the last."""

    def __init__(self, path: Path, plan: ShardPlan, num_tensors: int) -> None:
        self.path = path
        self.plan = plan
        self._left = num_tensors
        self._descriptor = -1
        self._lock = threading.Lock()

    def create(self) -> None:
        """Header and final size; the data is a hole until it is written. Raises RunError."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                _write_all(descriptor, memoryview(self.plan.header), 0)
                os.ftruncate(descriptor, self.plan.num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _write_failed(self.path, "the header", error) from error

    def open(self) -> int:
        """The file descriptor."""
        with self._lock:
            if self._descriptor < 0:
                try:
                    self._descriptor = os.open(self.path, os.O_WRONLY)
                except OSError as error:
                    raise _write_failed(self.path, "tensors", error) from error
            return self._descriptor

    def done_with_one(self) -> None:
        """Count one tensor as written."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._close()

    def close(self) -> None:
        """Close the descriptor if it is open."""
        with self._lock:
            self._close()

    def flush(self) -> None:
        """Wait until the file is on the disk. Raises RunError."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _write_failed(self.path, "its data to the disk", error) from error

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _PerThread(threading.local):
    """What one writing thread keeps; `__init__` runs once in each thread that looks."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.streams: dict[torch.device, torch.cuda.Stream] = {}


class _Staging:
    """Per thread: one CUDA stream per device and one pinned buffer, made when first needed."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._local = _PerThread()

    def pieces(self, tensor: torch.Tensor, ready: torch.cuda.Event) -> Iterator[memoryview]:
        """The bytes of a CUDA tensor, a buffer at a time; each piece is valid until the next is asked for.

        Runs in the writing thread. `ready` was recorded on the caller's stream after the tensor was made. The tensor
        is held until the last copy is complete, so its memory is not given to anybody before.
        """
        buffer, stream = self._own(tensor.device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            data = tensor.contiguous().reshape(-1).view(torch.uint8)
        for part in data.split(self._num_bytes):
            target = buffer[: part.numel()]
            with torch.cuda.stream(stream):
                target.copy_(part, non_blocking=True)
            stream.synchronize()
            yield target.numpy().data

    def _own(self, device: torch.device) -> tuple[torch.Tensor, torch.cuda.Stream]:
        """This thread's buffer (uint8) and its stream on `device`."""
        own = self._local
        if own.buffer is None:
            own.buffer = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True)
        if device not in own.streams:
            own.streams[device] = torch.cuda.Stream(device)
        return own.buffer, own.streams[device]


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a CPU tensor. A 0-d tensor has no dimension to reinterpret, hence the reshape first."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _file_pieces(path: Path, offset: int, num_bytes: int) -> Iterator[memoryview]:
    """`num_bytes` bytes of a file from `offset` on. Raises RunError if it cannot be read or is too short."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from error
    with contextlib.closing(os.fdopen(descriptor, "rb", buffering=0)) as file:
        buffer = memoryview(bytearray(min(PIECE_BYTES, num_bytes)))
        done = 0
        while done < num_bytes:
            try:
                got = os.preadv(file.fileno(), [buffer[: num_bytes - done]], offset + done)
            except OSError as error:
                raise RunError(f"{path}: cannot be read: {error.strerror}") from error
            if not got:
                raise RunError(f"{path}: ends at byte {offset + done}, a tensor needs {num_bytes - done} bytes more")
            yield buffer[:got]
            done += got


def _write_all(descriptor: int, data: memoryview, position: int) -> int:
    """`pwrite` until all of `data` is written (one call takes 2 GiB at most); returns the position behind it."""
    while len(data):
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written
    return position


def _write_failed(path: Path, what: str, error: OSError) -> RunError:
    """The message for a failed write, with the cure where one is known."""
    return RunError(Problem(f"{path}: cannot write {what}: {error.strerror or error}", CURES.get(error.errno, "")))


def _count(what: str, names: Sequence[str]) -> list[Problem]:
    """One problem for all tensors of a kind, none if there are none."""
    if not names:
        return []
    shown = ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
    return [Problem(f"{len(names)} planned tensors {what}: {shown}")]
