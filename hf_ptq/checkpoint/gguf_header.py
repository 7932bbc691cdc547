"""The header of a GGUF file: its metadata and where its tensors lie, without reading a weight.

    magic "GGUF", version, number of tensors, number of metadata entries          (u32, u32, u64, u64)
    metadata: name, type, value;  tensors: name, dimensions (fastest first), type, offset from the start of the data
    data, beginning at the next multiple of `general.alignment` (32)

Written with the standard library alone, so that a wrong file is refused before anything heavy is imported. Arrays of
strings (a vocabulary, its merges) are passed over: only their length is kept. How many bytes a tensor has depends on
its type, which the package gguf knows: see `check_complete`.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_ptq.errors import Problem, UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: shape in the order of torch, type by its number in ggml, absolute offset in the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by name (an array of strings as its length), and the tensors in the order of the file."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the architecture: llama, qwen2, qwen3moe ..."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def num_elements(self) -> int:
        """Elements of all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)


class _Reader:
    """A position in the bytes of a file that moves on with each value read."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def values(self, codes: str) -> tuple[Any, ...]:
        """The next values, by their codes in `struct`; little-endian, unpadded."""
        found = struct.unpack_from("<" + codes, self.data, self.position)
        self.position += struct.calcsize("<" + codes)
        return found

    def string(self) -> str:
        """A length of 8 bytes, then UTF-8."""
        (length,) = self.values("Q")
        if length > len(self.data) - self.position:
            raise struct.error("a string runs past the end of the file")
        text = self.data[self.position : self.position + length].decode("utf-8")
        self.position += length
        return text

    def value(self, kind: int) -> Any:
        """One value of metadata."""
        if kind in _SCALARS:
            return self.values(_SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise struct.error(f"a value of the unknown type {kind}")
        element, count = self.values("IQ")
        if element in _SCALARS:
            return list(self.values(f"{count}{_SCALARS[element]}"))
        if element != _STRING:
            raise struct.error(f"an array of the unknown type {element}")
        for _ in range(count):  # strings have no common length: the only way past them is from one to the next
            (length,) = _LENGTH.unpack_from(self.data, self.position)
            self.position += 8 + length
        return count


def read_gguf_header(path: Path) -> GgufHeader:
    """Read the header of `path`. Raises `UserError`, naming the file, if there is none or not all of it."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise UserError(Problem(f"{path}: is no GGUF file (it does not begin with {MAGIC.decode()})"))
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _read(data)
    except OSError as error:
        raise UserError(Problem(f"{path}: cannot be read ({error.strerror or error})")) from None
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise UserError(Problem(f"{path}: truncated or corrupt: {error}", "fetch this file again")) from None
    problems = _problems(path, header)
    if problems:
        raise UserError(*problems)
    return header


def _read(data: mmap.mmap) -> GgufHeader:
    reader = _Reader(data)
    _, version, num_tensors, num_entries = reader.values("4sIQQ")
    if version not in VERSIONS:
        raise struct.error(f"version {version} of the format, known are {VERSIONS}")
    metadata = {}
    for _ in range(num_entries):
        name = reader.string()
        metadata[name] = reader.value(reader.values("I")[0])
    tensors = []
    for _ in range(num_tensors):
        name = reader.string()
        (num_dimensions,) = reader.values("I")
        shape = tuple(reversed(reader.values(f"{num_dimensions}Q")))
        ggml_type, offset = reader.values("IQ")
        tensors.append((name, shape, ggml_type, offset))
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise struct.error(f"general.alignment is {alignment!r}")
    start = -(-reader.position // alignment) * alignment
    return GgufHeader(metadata, tuple(GgufTensor(name, shape, kind, start + at) for name, shape, kind, at in tensors))


def _problems(path: Path, header: GgufHeader) -> list[Problem]:
    problems = []
    if not header.architecture or not header.tensors:
        problems.append(Problem(f"{path}: names no architecture or holds no tensors, so it is no model"))
    parts = header.metadata.get("split.count", 1)
    if parts not in (0, 1):
        cure = "join them: `llama-gguf-split --merge FIRST-PART WHOLE.gguf`"
        problems.append(Problem(f"{path}: is one of {parts} parts of a model", cure))
    end = max((tensor.offset for tensor in header.tensors), default=0)
    if end >= path.stat().st_size and header.tensors:
        what = f"{path}: truncated: has {path.stat().st_size} bytes, its last tensor begins at {end}"
        problems.append(Problem(what, "fetch this file again"))
    return problems


def check_complete(path: Path, header: GgufHeader) -> list[Problem]:
    """Problems with the bytes of the tensors: types the package gguf does not know, and a file that ends too soon."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes = {int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType}
    unknown = sorted({tensor.ggml_type for tensor in header.tensors if tensor.ggml_type not in sizes})
    if unknown:
        return [Problem(f"{path}: has tensors of the unknown ggml types {unknown}", "update the package gguf")]
    ends = []
    for tensor in header.tensors:
        block_elements, block_bytes = sizes[tensor.ggml_type]
        ends.append(tensor.offset + math.prod(tensor.shape) // block_elements * block_bytes)
    file_bytes = path.stat().st_size
    if max(ends) <= file_bytes:
        return []
    cut = [tensor.name for tensor, end in zip(header.tensors, ends, strict=True) if end > file_bytes]
    what = f"{path}: truncated: has {file_bytes} of {max(ends)} bytes, incomplete: {', '.join(cut[:5])}"
    return [Problem(what, "fetch this file again")]
