"""Lazy tensors of a source: nothing is read before it is sliced, and only the rows asked for.

A `LazyTensor` has the interface that transformers' loader expects of a safetensors slice (`get_shape`, `get_dtype`,
`[...]`), so that the loader, with its expert-parallel and FSDP2 sharding, works on it unchanged. Bytes are read with
`pread` into memory of their own: no file page is mapped, the host memory of a rank is what it keeps, and the bytes
read can be counted. A source in a quantized format will be one more class with this interface that dequantizes the
rows asked for.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import EllipsisType
from typing import Self

import torch

from hf_ptq.checkpoint.dtypes import TORCH_DTYPES
from hf_ptq.checkpoint.source import Source, TensorEntry, file_identity
from hf_ptq.errors import Problem, RunError

Index = int | slice | EllipsisType
READ_CHUNK = 1 << 30  # Linux reads at most about 2 GiB a call


class SourceReader:
    """Open files of one source, shared by its lazy tensors; counts the bytes read. A context manager."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def refuse_changed(self) -> None:
        """Raise RunError naming the files of the source that are no longer those that were opened."""
        as_found = self.source.as_found
        changed = [file for file, found in as_found.items() if file_identity(self.source.directory / file) != found]
        if changed:
            raise RunError(Problem(f"the source changed during the run: {', '.join(changed)}", "run again"))

    def path(self, entry: TensorEntry) -> Path:
        """The file that holds a tensor."""
        return self.source.directory / entry.file

    def tensor(self, name: str) -> LazyTensor:
        """The lazy tensor of that name. Raises KeyError where the source has none."""
        return LazyTensor(self, self.source.tensors[name])

    def read_bytes(self, entry: TensorEntry, start: int, num_bytes: int) -> torch.Tensor:
        """`num_bytes` bytes of a tensor's data from byte `start` on; uint8 on the CPU.

        Raises RunError where the file ends early (it changed since its header was read).
        """
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if self.read_into(memoryview(buffer.numpy()), entry.file, entry.offset + start) < num_bytes:  # type: ignore[arg-type]
            raise self.ended_inside(entry)
        return buffer

    def read_into(self, view: memoryview, file: str, offset: int) -> int:
        """Fill `view` (bytes) with what `file` holds from the absolute byte `offset` on; any thread may call it.

        Returns the bytes read, fewer than asked for where the file ends early. Raises OSError.
        """
        descriptor = self._open(file)
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + READ_CHUNK]], offset + done)
            if count == 0:
                break
            done += count
        with self._lock:
            self.bytes_read += done
        return done

    def ended_inside(self, entry: TensorEntry) -> RunError:
        """The error for a file that ends before a tensor's last byte, though its header was whole."""
        return RunError(f"{self.path(entry)} ended inside {entry.name}: the file changed while it was read")

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(self.source.directory / file, os.O_RDONLY)
            return self._files[file]


class LazyTensor:
    """One tensor of a source, read when it is indexed."""

    def __init__(self, reader: SourceReader, entry: TensorEntry) -> None:
        self.reader = reader
        self.entry = entry

    def get_shape(self) -> list[int]:
        """The stored shape."""
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        """The safetensors spelling of the stored dtype."""
        return self.entry.dtype

    def __getitem__(self, index: Index | tuple[Index, ...]) -> torch.Tensor:
        """Rows along the first dimension are one read; further indices are applied to what was read."""
        indices = index if isinstance(index, tuple) else (index,)
        shape = self.entry.shape
        if not shape or not indices or isinstance(indices[0], EllipsisType):
            whole = self._rows(0, shape[0] if shape else 1)
            return whole if indices in ((Ellipsis,), ()) else whole[indices]
        first, rest = indices[0], indices[1:]
        if isinstance(first, int):
            row = range(shape[0])[first]  # IndexError where there is no such row
            rows = self._rows(row, row + 1)[0]
            return rows[rest] if rest else rows
        start, stop, step = first.indices(shape[0])
        if step != 1:
            return self._rows(0, shape[0])[indices]
        rows = self._rows(start, max(start, stop))
        return rows[(slice(None), *rest)] if rest else rows

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        entry = self.entry
        dtype = TORCH_DTYPES[entry.dtype]
        if not entry.shape:
            return self.reader.read_bytes(entry, 0, entry.num_bytes).view(dtype).reshape(())
        row_bytes = entry.num_bytes // entry.shape[0] if entry.shape[0] else 0
        data = self.reader.read_bytes(entry, start * row_bytes, (stop - start) * row_bytes)
        return data.view(dtype).reshape(stop - start, *entry.shape[1:])
