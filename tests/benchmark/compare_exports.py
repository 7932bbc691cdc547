"""Compare exports of one source, made by different plans or machines, with the first of them.

python tests/benchmark/compare_exports.py FIRST OTHER [OTHER ...]

Weights and weight scales must be the same bytes (SHA-256); of activation scales the largest relative difference is
told, which must not be above 2^-7 (one or two bf16 steps: kernels differ by the shapes that they are given).
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LARGEST = 2.0**-7
ACTIVATION_SCALES = (".input_scale", ".k_scale", ".v_scale")


def tensors(directory: Path) -> Iterator[tuple[str, Path, int, int, str]]:
    """(name, file, first byte, bytes, dtype and shape) of every tensor, read from the headers by hand."""
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            yield name, file, 8 + length + start, end - start, f"{entry['dtype']} {entry['shape']}"


def read(directory: Path) -> dict[str, str | float]:
    """Name -> digest; the value itself for scales of activations."""

    def one(place: tuple[str, Path, int, int, str]) -> tuple[str, str | float]:
        name, file, start, size, kind = place
        with file.open("rb") as stream:
            stream.seek(start)
            data = stream.read(size)
        if name.endswith(ACTIVATION_SCALES):
            return name, struct.unpack("<f", data)[0]
        return name, hashlib.sha256(kind.encode() + data).hexdigest()

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(one, tensors(directory)))


def compare(first: dict[str, str | float], other: dict[str, str | float]) -> tuple[list[str], float]:
    """(names of tensors that differ or are missing, the largest relative difference of activation scales)."""
    differing = sorted(first.keys() ^ other.keys())
    largest = 0.0
    for name in first.keys() & other.keys():
        one, two = first[name], other[name]
        if isinstance(one, float) and isinstance(two, float):
            largest = max(largest, abs(two / one - 1) if one else float(one != two))
        elif one != two:
            differing.append(name)
    return differing, largest


def main(directories: list[str]) -> int:
    first, failed = read(Path(directories[0])), False
    for directory in directories[1:]:
        differing, largest = compare(first, read(Path(directory)))
        failed |= bool(differing) or largest > LARGEST
        told = f"{len(differing)} of {len(first)} weights and weight scales differ {differing[:5]}"
        print(f"{directory}: {told}; activation scales differ by at most {largest:.2e} (allowed {LARGEST:.2e})")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
