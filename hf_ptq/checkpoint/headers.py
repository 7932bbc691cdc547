"""The header of a safetensors file, read and checked without reading a weight, also of a file that is not here.

    bytes 0..8       length n of the header, little-endian unsigned
    bytes 8..8+n     JSON: tensor name -> {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__"
    bytes 8+n..      data; offsets count from here, the tensors lie side by side and fill the file exactly

A file is accepted only if every one of these holds, so whoever reads `num_bytes` at `offset` later reads that tensor
and nothing else. Each file gives at most one problem, which names the file and the first few things wrong with it.

What this file does not know: indices, other files, and what the tensors are for.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hf_ptq.errors import Problem

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
LFS_POINTER = b"version https://git-lfs"  # what a clone without git-lfs has in the place of a large file

DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the source: `num_bytes` at the absolute `offset` of `file` (relative to the directory)."""

    name: str
    file: str
    dtype: str  # safetensors spelling: BF16, F32, F8_E4M3 ...
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Beginning:
    """The first bytes of a file that is not here, up to the end of its header, and the size of the whole file."""

    where: str  # how messages name the file
    start: bytes
    file_bytes: int


class _HeaderError(Exception):
    """What is wrong with a header; becomes a `Problem` that names the file."""


class _PointerError(_HeaderError):
    """There is no header: the file stands for another."""


def some(items: Iterable[object], limit: int = 5, separator: str = ", ") -> str:
    """The first `limit` items as text, and how many more there are."""
    texts = [str(item) for item in items]
    more = len(texts) - limit
    return separator.join(texts[:limit]) + (f" and {more} more" if more > 0 else "")


def read_header(
    directory: Path, file: str, beginning: Beginning | None = None
) -> tuple[list[TensorEntry], Problem | None]:
    """The tensors of `directory/file` in the order of their bytes, or none and what is wrong with the file.

    `beginning`: read this instead, of a file that is not there yet.
    """
    path = directory / file
    where = path if beginning is None else beginning.where
    cure = "fetch this file again" if beginning is None else "take another --revision, or tell the repository's owners"
    try:
        if beginning is None:
            with path.open("rb") as stream:
                file_bytes = path.stat().st_size
                blob = _read_header_bytes(stream, file_bytes)
        else:
            file_bytes = beginning.file_bytes
            blob = _read_header_bytes(io.BytesIO(beginning.start), file_bytes)
        entries = _parse(blob, file)
        _check_layout(entries, data_start=8 + len(blob), file_bytes=file_bytes)
    except OSError as error:
        return [], Problem(f"{path}: cannot be read ({error.strerror or error})")
    except _HeaderError as error:
        if isinstance(error, _PointerError) and beginning is None:
            cure = "run `git lfs pull` in that directory"
        return [], Problem(f"{where}: {error}", cure)
    return entries, None


def _read_header_bytes(stream: BinaryIO, file_bytes: int) -> bytes:
    start = stream.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        raise _PointerError("is a Git LFS pointer, not the weights")
    if len(start) < 8:
        raise _HeaderError(f"truncated: {file_bytes} bytes, less than the length of a header")
    (header_bytes,) = struct.unpack("<Q", start[:8])
    if header_bytes > MAX_HEADER_BYTES:
        raise _HeaderError(f"corrupt: its first 8 bytes promise a header of {header_bytes} bytes")
    if 8 + header_bytes > file_bytes:
        raise _HeaderError(f"truncated: a header of {header_bytes} bytes is promised, the file has {file_bytes}")
    stream.seek(8)
    return stream.read(header_bytes)


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
        raise _HeaderError(f"corrupt: its header has {some(twice)} twice")
    return parsed


def _parse(blob: bytes, file: str) -> list[TensorEntry]:
    try:
        header = json.loads(blob.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of thousands of digits, a deep nest
        raise _HeaderError(f"corrupt: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise _HeaderError("corrupt: its header is not a JSON object")
    header.pop("__metadata__", None)
    entries, wrong = [], []
    for name, info in header.items():
        entry = _entry(name, file, info, data_start=8 + len(blob))
        (wrong if isinstance(entry, str) else entries).append(entry)
    if wrong:
        raise _HeaderError("corrupt: " + some(wrong, 3, "; "))
    return sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes))


def _naturals(value: object) -> tuple[int, ...] | None:
    """A JSON list of non-negative integers, or None."""
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None


def _entry(name: str, file: str, info: object, data_start: int) -> TensorEntry | str:
    """The entry, or what is wrong with it."""
    fields = info if isinstance(info, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), _naturals(fields.get("shape")), _naturals(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        return f"{name} has no proper dtype, shape and data_offsets"
    if dtype not in DTYPE_BITS:
        return f"{name} has the unknown dtype {dtype!r}"
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
        return f"{name} is {dtype} of shape {list(shape)}, but has {end - begin} bytes"
    return TensorEntry(name, file, dtype, shape, data_start + begin, end - begin)


def _check_layout(entries: Sequence[TensorEntry], data_start: int, file_bytes: int) -> None:
    """Side by side, and exactly to the end of the file."""
    end, wrong = data_start, []
    for entry in entries:
        if entry.offset < end:
            wrong.append(f"{entry.name} overlaps the tensor before it")
        elif entry.offset > end:
            wrong.append(f"{entry.offset - end} bytes before {entry.name} belong to no tensor")
        end = max(end, entry.offset + entry.num_bytes)
    if wrong:
        raise _HeaderError("corrupt: " + some(wrong, 3, "; "))
    if end > file_bytes:
        lost = some(entry.name for entry in entries if entry.offset + entry.num_bytes > file_bytes)
        raise _HeaderError(f"truncated: has {file_bytes} of {end} bytes, incomplete: {lost}")
    if end < file_bytes:
        raise _HeaderError(f"corrupt: {file_bytes - end} bytes after its last tensor")
