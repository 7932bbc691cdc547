"""The fast way from the source's files into the model: every parameter is a few ranges of bytes.

The ranges are those of ranges.py. The parameter is allocated where it will live, and threads read the files straight
into it. On a CPU `pread` writes into the parameter's own memory: no page of a file is mapped, nothing is copied twice.
On a GPU a thread reads a chunk of at most CHUNK bytes into a pinned buffer and starts one asynchronous copy per range;
a buffer is used again when its copies are done, so pinned memory is at most 2 * threads * CHUNK however large the
model. (torch keeps those buffers for whoever pins memory of that size next.) A unit's ranges are read in the order of
the files, what is adjacent in one read, and the next units are read while the caller works on one that is filled.

Parameters that are not made of such ranges alone (another converter, a shape that does not fit) go through
transformers' loader, which also has the words for what is wrong with them.

This file does not know recipes, formats, exports or process groups; `held` and `places` are all it is told of a plan.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import nn

from hf_ptq.checkpoint.dtypes import TORCH_DTYPES
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import TensorEntry
from hf_ptq.errors import HfPtqError, RunError
from hf_ptq.model.build import MetaModel, load_unit
from hf_ptq.model.ranges import Range, lay_out_parameters
from hf_ptq.model.sharding import as_share_of
from hf_ptq.model.units import Unit

CHUNK = 32 << 20  # bytes of one read and of one pinned buffer
READ_AHEAD = 1 << 30  # bytes being read behind the unit that is waited for: keeps the threads busy over small units
ALIGNMENT = 8  # tensors are cut into chunks at multiples of this: of every element's size

# --- the reads ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Bytes [start, start + num_bytes) of a source tensor, and the 1-D slice of the parameter that they become."""

    entry: TensorEntry
    start: int
    num_bytes: int
    target: torch.Tensor

    @property
    def offset(self) -> int:
        return self.entry.offset + self.start

    @property
    def end(self) -> int:
        return self.offset + self.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.entry.dtype]


def _cut(targets: Iterable[tuple[Range, torch.Tensor]]) -> Iterator[list[_Piece]]:
    """Chunks to read at once: pieces adjacent in a file, in its order, for one device, at most CHUNK bytes."""
    chunk: list[_Piece] = []
    for part, target in sorted(targets, key=lambda pair: (pair[0].entry.file, pair[0].entry.offset, pair[0].skip)):
        entry, size, done = part.entry, TORCH_DTYPES[part.entry.dtype].itemsize, 0
        first, num_bytes = part.skip * size, part.count * size
        end = (chunk[-1].entry.file, chunk[-1].end, chunk[-1].target.device) if chunk else None
        if chunk and end != (entry.file, entry.offset + first, target.device):
            yield chunk
            chunk = []
        while done < num_bytes:
            room = CHUNK - (chunk[-1].end - chunk[0].offset if chunk else 0)
            left = num_bytes - done
            take = left if left <= room else room - room % ALIGNMENT
            if take:
                chunk.append(_Piece(entry, first + done, take, target[done // size : (done + take) // size]))
                done += take
            if done < num_bytes:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


def _runs(pieces: list[_Piece]) -> Iterator[tuple[list[_Piece], torch.Tensor]]:
    """Adjacent pieces that lie side by side in the parameter too (gate and up of an expert), and where they go.

    Each run is one read or one copy: what a call costs is more than what most single matrices take.
    """
    run: list[_Piece] = []
    for piece in pieces:
        if run and not _is_next(run[-1], piece):
            yield run, _spanned(run)
            run = []
        run.append(piece)
    yield run, _spanned(run)


def _is_next(one: _Piece, other: _Piece) -> bool:
    """Whether `other` goes right behind `one`, in the same parameter (others may lie behind it by chance)."""
    first, second = one.target, other.target
    is_one_parameter = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    is_behind = first.data_ptr() + first.nbytes == second.data_ptr()
    return is_one_parameter and is_behind and one.dtype == other.dtype


def _spanned(run: list[_Piece]) -> torch.Tensor:
    """The 1-D slice of the parameter that a run fills."""
    return run[0].target.as_strided((sum(piece.target.numel() for piece in run),), (1,))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous 1-D CPU tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _read(reader: SourceReader, pieces: list[_Piece], view: memoryview) -> None:
    """Adjacent pieces into `view`; raises RunError naming the file and the tensor where it failed."""
    first, last = pieces[0].entry, pieces[-1].entry
    try:
        count = reader.read_into(view, first.file, pieces[0].offset)
    except OSError as error:
        names = first.name if first is last else f"{first.name} ... {last.name}"
        raise RunError(f"{reader.path(first)}: cannot read {names}: {error.strerror or error}") from error
    if count < len(view):
        end = pieces[0].offset + count
        raise reader.ended_inside(next(piece.entry for piece in pieces if end < piece.end))


def _read_in_place(reader: SourceReader, pieces: list[_Piece]) -> None:
    """Into parameters on the CPU; a tensor stored in another dtype by way of a chunk of that dtype."""
    for run, target in _runs(pieces):
        if run[0].dtype == target.dtype:
            _read(reader, run, _bytes_of(target))
        else:
            stored = torch.empty(target.numel(), dtype=run[0].dtype)
            _read(reader, run, _bytes_of(stored))
            target.copy_(stored)


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Reached when all work that `stream` has now is done; a thread that waits for it sleeps."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


class _Lane:
    """A pinned buffer with a CUDA stream for each device that it is emptied to; used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):  # pinning would otherwise start a context on the first GPU
            self.buffer = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
        self.streams: dict[torch.device, torch.cuda.Stream] = {}
        self.copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Until the buffer may be written again."""
        if self.copied is not None:
            self.copied.synchronize()

    def carry(self, reader: SourceReader, pieces: list[_Piece], allocated: torch.cuda.Event) -> torch.cuda.Event:
        """Read a chunk and start its copies; the event is reached when they are done.

        `allocated`: the parameters' memory is free of earlier work when it is reached.
        """
        self.wait()
        start, device = pieces[0].offset, pieces[0].target.device
        _read(reader, pieces, _bytes_of(self.buffer[: pieces[-1].end - start]))
        if device not in self.streams:
            self.streams[device] = torch.cuda.Stream(device)
        stream = self.streams[device]
        with torch.cuda.stream(stream):
            stream.wait_event(allocated)
            for run, target in _runs(pieces):
                self._copy(self.buffer[run[0].offset - start : run[-1].end - start], run[0].dtype, target)
            self.copied = copied = _event(stream)
        return copied

    def _copy(self, read: torch.Tensor, dtype: torch.dtype, target: torch.Tensor) -> None:
        if dtype == target.dtype:
            target.view(torch.uint8).copy_(read, non_blocking=True)
        else:  # a new tensor is aligned to its elements, wherever the bytes lie in the chunk
            stored = torch.empty(read.numel(), dtype=torch.uint8, device=target.device)
            stored.copy_(read, non_blocking=True)
            target.copy_(stored.view(dtype), non_blocking=True)


# --- the filler --------------------------------------------------------------------------------


@dataclass
class _Filling:
    """A unit on its way."""

    unit: Unit
    values: dict[str, torch.Tensor]  # by parameter
    gpus: set[torch.device] = field(default_factory=set)  # of the values
    reads: list[Future[torch.cuda.Event | None]] = field(default_factory=list)
    num_bytes: int = 0


class Filler:
    """Fills the units of a meta model from its source. A context manager: threads and buffers live as long as it.

    `places`: parameter -> the device where it is filled, if not on `device`. `read_ahead`: bytes of further units that
    may be on their way, READ_AHEAD if not given; 0 has no unit begun before the caller is done with the last one.
    """

    def __init__(
        self,
        meta: MetaModel,
        reader: SourceReader,
        device: torch.device,
        threads: int = 8,
        held: Mapping[str, range] | None = None,
        places: Mapping[str, torch.device] | None = None,
        read_ahead: int | None = None,
    ) -> None:
        self._meta = meta
        self._reader = reader
        self._device = device
        self._places = places or {}
        self._read_ahead = READ_AHEAD if read_ahead is None else read_ahead
        self._layouts = lay_out_parameters(meta, reader.source.tensors, held)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="fill")
        # Lanes are made when they are first needed: a small model pins little.
        self._lanes: queue.SimpleQueue[_Lane | None] = queue.SimpleQueue()
        for _ in range(2 * threads):
            self._lanes.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        while not self._lanes.empty():
            lane = self._lanes.get()
            if lane is not None:
                lane.wait()

    def is_fast(self, name: str) -> bool:
        """Whether the source tensor `name` is read as a range; the others go through transformers' loader."""
        return self._meta.placements[name].parameter in self._layouts

    def total_bytes(self, units: Iterable[Unit]) -> int:
        """What `fill` will tell `advance` of in all; a little less, where transformers' loader reads a share."""
        layouts = self._layouts
        fast = sum(part.num_bytes for layout in layouts.values() for part in layout.ranges)
        rest = (name for unit in units for name in unit.tensors if not self.is_fast(name))
        return fast + sum(self._reader.source.tensors[name].num_bytes for name in rest)

    def fill(self, units: Iterable[Unit], advance: Callable[[int], object]) -> Iterator[Unit]:
        """Yield each unit when its weights are in the model, while the next ones are being read.

        `advance` is called with the bytes done, by any thread. What the caller launches on the device's current
        stream sees the weights. Raises RunError naming tensors and files, with every problem found until then.
        """
        ahead: deque[_Filling] = deque()
        for unit in units:
            ahead.append(self._start(unit, advance))
            while ahead and sum(filling.num_bytes for filling in ahead) - ahead[0].num_bytes >= self._read_ahead:
                yield self._finish(ahead.popleft(), advance)
        while ahead:
            yield self._finish(ahead.popleft(), advance)

    def _start(self, unit: Unit, advance: Callable[[int], object]) -> _Filling:
        """Allocate the unit's parameters and queue their reads."""
        parameters = dict.fromkeys(self._meta.placements[name].parameter or "" for name in unit.tensors)
        filling = _Filling(unit, {})
        targets = []
        for name in parameters:
            if (layout := self._layouts.get(name)) is not None:
                device = self._places.get(name, self._device)
                filling.values[name] = value = torch.empty(layout.shape, dtype=layout.dtype, device=device)
                targets += [(part, value.view(-1)[part.start : part.stop]) for part in layout.ranges]
        filling.num_bytes = sum(part.num_bytes for part, _ in targets)
        filling.gpus = {value.device for value in filling.values.values() if value.is_cuda}
        allocated = {gpu: _event(torch.cuda.current_stream(gpu)) for gpu in filling.gpus}
        filling.reads = [
            self._pool.submit(self._carry, chunk, allocated.get(chunk[0].target.device), advance)
            for chunk in _cut(targets)
        ]
        return filling

    def _carry(
        self, pieces: list[_Piece], allocated: torch.cuda.Event | None, advance: Callable[[int], object]
    ) -> torch.cuda.Event | None:
        copied = None
        if allocated is None:
            _read_in_place(self._reader, pieces)
        else:
            lane = self._lanes.get()
            try:
                lane = lane or _Lane(pieces[0].target.device)
                copied = lane.carry(self._reader, pieces, allocated)
            finally:
                self._lanes.put(lane)
        advance(pieces[-1].end - pieces[0].offset)
        return copied

    def _finish(self, filling: _Filling, advance: Callable[[int], object]) -> Unit:
        """Wait for the unit's reads, set its parameters, and let transformers' loader do the rest of it."""
        for copied in filter(None, self._results(filling.reads)):
            for gpu in filling.gpus:
                torch.cuda.current_stream(gpu).wait_event(copied)
        for name, value in filling.values.items():
            _set(self._meta.model, name, value)
        rest = [name for name in filling.unit.tensors if not self.is_fast(name)]
        if rest:
            load_unit(self._meta, {name: self._reader.tensor(name) for name in rest}, self._device)
            for name in {self._meta.placements[name].parameter or "" for name in rest} & self._places.keys():
                _set(self._meta.model, name, _get(self._meta.model, name).to(self._places[name]))
            advance(sum(self._reader.source.tensors[name].num_bytes for name in rest))
        return filling.unit

    def _results(self, reads: list[Future[torch.cuda.Event | None]]) -> list[torch.cuda.Event | None]:
        """What the reads return; after a failure no further read is begun, and those that failed fail together."""
        done, waiting = wait(reads, return_when=FIRST_EXCEPTION)
        if waiting:
            self._pool.shutdown(wait=True, cancel_futures=True)
            done |= {read for read in waiting if not read.cancelled()}
        errors = [error for read in done if (error := read.exception()) is not None]
        problems = [problem for error in errors if isinstance(error, HfPtqError) for problem in error.problems]
        if problems:
            raise RunError(*sorted(dict.fromkeys(problems), key=str)) from errors[0]
        if errors:
            raise errors[0]
        return [read.result() for read in reads]


def _get(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    return (module._parameters | module._buffers)[leaf]  # type: ignore[return-value]


def _set(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a filled tensor into its module, marked so that transformers does not initialise it again."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    is_buffer = leaf in dict(module.named_buffers(recurse=False))
    value = as_share_of(module._parameters.get(leaf), value)
    tensor = value if is_buffer else nn.Parameter(value, requires_grad=False)
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(module, leaf, tensor)
