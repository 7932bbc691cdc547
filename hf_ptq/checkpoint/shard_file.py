"""One file of the layout on its way to the disk: made at full size, written at offsets, closed by its last tensor.

This file knows positions and bytes; what they are of stands in the `ShardPlan`.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from hf_ptq.checkpoint.shards import ShardPlan
from hf_ptq.errors import Problem, RunError

CURES: dict[int | None, str] = {
    errno.ENOSPC: "free room there, or take another --export_path",
    errno.EDQUOT: "free room in that quota, or take another --export_path",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or --max_shard_size",
}


class ShardFile:
    """One shard: created at once, opened by the first of its tensors, closed by the last."""

    def __init__(self, path: Path, plan: ShardPlan) -> None:
        self.path = path
        self.plan = plan
        self._left = len(plan.tensors)
        self._descriptor = -1
        self._lock = threading.Lock()

    def create(self) -> None:
        """Header and final size; the data is a hole until it is written. Raises RunError."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
            try:
                write_all(descriptor, memoryview(self.plan.header), 0)
                os.ftruncate(descriptor, self.plan.num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_failed(self.path, "the header", error) from error

    def open(self) -> int:
        """The file descriptor."""
        with self._lock:
            if self._descriptor < 0:
                try:
                    self._descriptor = os.open(self.path, os.O_WRONLY)
                except OSError as error:
                    raise write_failed(self.path, "tensors", error) from error
            return self._descriptor

    def done_with(self, num_tensors: int) -> None:
        """Count tensors as written."""
        with self._lock:
            self._left -= num_tensors
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
            raise write_failed(self.path, "its data to the disk", error) from error

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def write_all(descriptor: int, data: memoryview, position: int) -> int:
    """`pwrite` until all of `data` is written (one call takes 2 GiB at most); returns the position behind it."""
    while len(data):
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written
    return position


def write_failed(path: Path, what: str, error: OSError) -> RunError:
    """The message for a failed write, with the cure where one is known."""
    return RunError(Problem(f"{path}: cannot write {what}: {error.strerror or error}", CURES.get(error.errno, "")))
