"""The layout of a safetensors checkpoint, computed before any of its data exists.

The idea: a safetensors file is an 8-byte length, a JSON header and the tensors' bytes one after the other, so names,
dtypes and shapes alone fix every file name, every offset and every size. `lay_out` is that pure function. What it
buys: the number of shards is in the file names from the start, tensors can be written in any order by any thread,
ranks write files of their own without asking each other, the room on disk is known exactly, and a tensor that nobody
wrote is found by name.

The arithmetic: file = 8 + header + data, with 8 + header a multiple of 8. Within a file the tensors with wide
elements come first, so each starts at a multiple of its element size and there are no gaps (the format forbids them).

This file knows nothing of torch, of paths, or of what the tensors mean.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
METADATA: dict[str, str] = {"format": "pt"}  # transformers refuses files without it

# Bits, not bytes: checkpoints with E2M1 or 6-bit tensors exist, and a carried-over tensor may be one.
DTYPE_BITS: dict[str, int] = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that will be written: its name, its dtype in safetensors spelling, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the data; 0 for an empty tensor. ValueError if the dtype is unknown or ends within a byte."""
        if self.dtype not in DTYPE_BITS:
            raise ValueError(f"{self.name}: {self.dtype} is no safetensors dtype; there are {sorted(DTYPE_BITS)}")
        bits = math.prod(self.shape) * DTYPE_BITS[self.dtype]
        if bits % 8:
            raise ValueError(f"{self.name}: {list(self.shape)} elements of {self.dtype} do not fill whole bytes")
        return bits // 8


@dataclass(frozen=True)
class ShardPlan:
    """One file, known to the byte.

    `tensors` stand in file order; `header` is everything before the data (8-byte length and padded JSON); `offsets`
    are absolute positions in the file; `num_bytes` is the size of the file; `owner` is the rank that writes it.
    """

    file: str
    tensors: tuple[TensorPlan, ...]
    header: bytes
    offsets: dict[str, int]
    num_bytes: int
    owner: int = 0


def lay_out(
    tensors: Sequence[TensorPlan],
    max_shard_bytes: int,
    owners: Mapping[str, int] | None = None,
    folder: str = "",
) -> tuple[ShardPlan, ...]:
    """The files of a checkpoint that holds `tensors`, filled greedily in their order.

    `owners`: name -> the rank that writes it (None: rank 0 all); each rank's tensors are in files of its own. A file
    has at most `max_shard_bytes` unless it holds a single tensor. One file is named model.safetensors, more are
    model-00001-of-000NN.safetensors, in `folder` where one is given. No tensors, no files. ValueError if a name is
    given twice.
    """
    twice = [name for name, count in Counter(t.name for t in tensors).items() if count > 1]
    if twice or any(t.name == "__metadata__" for t in tensors):
        raise ValueError(f"tensor names must be unique and not __metadata__; given twice: {twice[:10]}")
    by_owner: dict[int, list[TensorPlan]] = {}
    for tensor in tensors:
        by_owner.setdefault(owners[tensor.name] if owners else 0, []).append(tensor)
    batches = [(owner, batch) for owner, own in sorted(by_owner.items()) for batch in _fill(own, max_shard_bytes)]
    where = f"{folder}/" if folder else ""
    if len(batches) == 1:
        return (_shard(where + SINGLE_NAME, batches[0][1], batches[0][0]),)
    names = (f"{where}model-{number:05d}-of-{len(batches):05d}.safetensors" for number in range(1, len(batches) + 1))
    return tuple(_shard(name, batch, owner) for name, (owner, batch) in zip(names, batches, strict=True))


def indexed(shards: Iterable[ShardPlan]) -> tuple[ShardPlan, ...]:
    """The files that are the model's: those in a folder are something else."""
    return tuple(shard for shard in shards if "/" not in shard.file)


def index_json(shards: Iterable[ShardPlan]) -> dict[str, Any]:
    """model.safetensors.index.json: `total_size` is the bytes of the tensors, headers not counted."""
    shards = indexed(shards)
    files = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(tensor.num_bytes for shard in shards for tensor in shard.tensors)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}


def _fill(tensors: Sequence[TensorPlan], max_shard_bytes: int) -> list[list[TensorPlan]]:
    """Cut the list where the next tensor would make the file larger than `max_shard_bytes`."""
    digits = len(str(max_shard_bytes))  # no offset within such a file has more, so the entry below is an upper bound
    empty_header = len(_header_json([], [])) + 8 + 7  # length field and padding
    batches: list[list[TensorPlan]] = []
    used = 0
    for tensor in tensors:
        entry = len(_entry(tensor, 0, 0).encode()) + 2 * (digits - 1) + 1  # and a comma
        size = entry + tensor.num_bytes
        if not batches or used + size > max_shard_bytes:
            batches.append([])
            used = empty_header
        batches[-1].append(tensor)
        used += size
    return batches


def _shard(file: str, tensors: Iterable[TensorPlan], owner: int) -> ShardPlan:
    """Order the tensors of one file and place them."""
    ordered = sorted(tensors, key=lambda t: -DTYPE_BITS[t.dtype])  # stable: ties stay in the caller's order
    ends: list[int] = []
    for tensor in ordered:
        ends.append((ends[-1] if ends else 0) + tensor.num_bytes)
    text = _header_json(ordered, ends)
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = [0, *ends][: len(ordered)]
    offsets = {tensor.name: len(header) + start for tensor, start in zip(ordered, starts, strict=True)}
    return ShardPlan(file, tuple(ordered), header, offsets, len(header) + (ends[-1] if ends else 0), owner)


def _header_json(tensors: Sequence[TensorPlan], ends: Sequence[int]) -> bytes:
    """The header's JSON, not yet padded; `ends[i]` is where tensor i ends, counted from the start of the data."""
    entries = [f'"__metadata__":{json.dumps(METADATA, separators=(",", ":"))}']
    entries += [_entry(tensor, end - tensor.num_bytes, end) for tensor, end in zip(tensors, ends, strict=True)]
    return ("{" + ",".join(entries) + "}").encode()


def _entry(tensor: TensorPlan, start: int, end: int) -> str:
    """One member of the header's JSON object."""
    shape = ",".join(map(str, tensor.shape))
    name = json.dumps(tensor.name, ensure_ascii=False)
    return f'{name}:{{"dtype":"{tensor.dtype}","shape":[{shape}],"data_offsets":[{start},{end}]}}'
