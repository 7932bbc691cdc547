"""The bytes of a tensor in a few pieces, wherever it lies: on the CPU, on a CUDA device, or in a file.

Pieces are small enough to stay in the processor's cache between the checksum and the write. A CUDA tensor comes
through pinned memory: each thread has one buffer and a stream of its own, so pinned memory is bounded by construction
and the caller's stream is not waited for. This file does not know where the bytes go.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from hf_ptq.errors import RunError

PIECE_BYTES = 4 << 20


class _PerThread(threading.local):
    """What one writing thread keeps; `__init__` runs once in each thread that looks."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None
        self.streams: dict[torch.device, torch.cuda.Stream] = {}


class CudaStaging:
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
            data = flat_bytes(tensor)
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
            with torch.cuda.device(device):  # pinning would otherwise start a context on the first GPU
                own.buffer = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True)
        if device not in own.streams:
            own.streams[device] = torch.cuda.Stream(device)
        return own.buffer, own.streams[device]


def cpu_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a CPU tensor."""
    data = flat_bytes(tensor).numpy().data
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in order as uint8 [num_bytes], on the tensor's device.

    Neither `flatten` nor `reshape` will do: a single element counts as contiguous with any stride (one scale of an
    expanded tensor has 0), but is reinterpreted only with stride 1; a 0-d tensor has no dimension to reinterpret.
    """
    dense = tensor.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def file_pieces(path: Path, offset: int, num_bytes: int) -> Iterator[memoryview]:
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
