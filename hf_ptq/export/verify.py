"""What was written against what was promised, before the export gets its name.

The promise is made of values that exist before any file does: the layout (`ShardPlan`), the checksums taken from
memory while writing, and an `Expectation`. Held against them, as read back from the disk:

    files     all that belong there, and no other
    headers   byte for byte the planned ones, and the files' sizes
    index     exact for several shards, absent for one
    contents  CRC-32 of all tensors, of an even sample where they are more than READ_BYTES; how much is said
    scales    finite and above zero: all small ones, the others as far as they are read for their checksum
    config    the files hold what was to be written, and say what the layout's servers have to read in them

Over several ranks each looks at the files that it wrote, and the first at what they make together. All problems are
collected and raised at once. Pages are dropped from the cache first where they are on the disk
already, so that it is the disk that is read. This file does not know the formats: the caller says which tensors are
scales, and samples.py judges what the weights decode to.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_ptq.checkpoint.dtypes import TORCH_DTYPES
from hf_ptq.checkpoint.shards import INDEX_NAME, ShardPlan, TensorPlan, index_json, indexed
from hf_ptq.errors import RunError
from hf_ptq.export.config_files import NESTED_NAME, json_text
from hf_ptq.export.destination import CONFIG_NAME
from hf_ptq.export.layouts.layout import Contents, Layout
from hf_ptq.report import REPORT_FILE, Report

READ_BYTES = 256 << 20  # contents read back at most, small scales apart
SMALL_BYTES = 4096
PIECE_BYTES = 4 << 20  # a multiple of every element size
BATCH_BYTES = 64 << 20
THREADS = 4
MAX_NAMED = 10  # of problems of one kind
E8M0_NAN = 255
_ABSENT = object()


@dataclass(frozen=True)
class Expectation:
    """What the export has to be, beside its tensors' bytes.

    `files`: name of each JSON file that is written anew -> its contents. `layout`, `contents`: what they have to say.
    `scales`: names of tensors that must be finite and above zero (E8M0 bytes: no NaN). `sidecars`: relative paths of
    the files that were copied from the source.
    """

    files: Mapping[str, Mapping[str, Any]]
    layout: Layout
    contents: Contents
    scales: Collection[str]
    sidecars: Collection[str | Path] = ()


@dataclass(frozen=True)
class Verified:
    """How much was read back; sums over ranks."""

    shards: int = 0
    tensors: int = 0
    of_tensors: int = 0
    bytes: int = 0
    of_bytes: int = 0

    def __add__(self, other: Verified) -> Verified:
        return Verified(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        count = f"{self.tensors} of {self.of_tensors} tensors"
        return f"{self.shards} headers; {count}, {self.percent:.0f} % of the bytes, read back"

    @property
    def percent(self) -> float:
        """Share of the bytes."""
        return 100 * self.bytes / self.of_bytes if self.of_bytes else 100.0


def verify_export(
    directory: Path,
    shards: Sequence[ShardPlan],
    checksums: Mapping[str, int],
    expectation: Expectation,
    report: Report,
    rank: int = 0,
) -> Verified:
    """How much was read back; RunError with everything that is wrong with the export, as far as it is `rank`'s to see.

    `checksums`: CRC-32 of each tensor that `rank` wrote.
    """
    scales = frozenset(expectation.scales)
    problems = _problems_of_the_whole(directory, shards, expectation, scales) if rank == 0 else []
    of_all = sum(tensor.num_bytes for _, tensor in _all_tensors(shards))
    shards = [shard for shard in shards if shard.owner == rank]
    damaged = {shard.file: list(_file_problems(directory, shard)) for shard in shards}
    whole = [shard for shard in shards if not damaged[shard.file]]
    problems += _limited(line for lines in damaged.values() for line in lines)
    wanted = _chosen(whole, scales, of_all)
    problems += _limited(_read_back(directory, wanted, checksums, scales, report))
    if problems:
        raise RunError(*problems)
    num_bytes, total = (sum(t.num_bytes for _, t in part) for part in (wanted, _all_tensors(shards)))
    return Verified(len(shards), len(wanted), sum(len(shard.tensors) for shard in shards), num_bytes, total)


def _problems_of_the_whole(
    directory: Path, shards: Sequence[ShardPlan], expectation: Expectation, scales: frozenset[str]
) -> list[str]:
    """The set of files, the index and both configurations."""
    files = {str(path) for path in _expected_files(shards, expectation)}
    problems = _limited(_file_set_problems(directory, files))
    problems += _index_problems(directory, shards)
    problems += _limited(_config_problems(directory, expectation))
    planned = {tensor.name for _, tensor in _all_tensors(shards)}
    return problems + _limited(f"{name}: a scale that the layout does not have" for name in sorted(scales - planned))


# --- files, headers, index -------------------------------------------------------------------------


def _expected_files(shards: Sequence[ShardPlan], expectation: Expectation) -> Iterator[str | Path]:
    """Everything that belongs into the export before the report is written."""
    yield from (shard.file for shard in shards)
    yield from expectation.files
    if len(indexed(shards)) > 1:
        yield INDEX_NAME
    yield from expectation.sidecars


def _file_set_problems(directory: Path, files: set[str]) -> Iterator[str]:
    """Files that are missing and files that nobody planned."""
    there = {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}
    yield from (f"{name}: missing" for name in sorted(files - there))
    yield from (f"{name}: no part of the export" for name in sorted(there - files - {REPORT_FILE}))


def _file_problems(directory: Path, shard: ShardPlan) -> Iterator[str]:
    """A shard's size and header against its plan."""
    path = directory / shard.file
    if not path.is_file():
        return  # told with the set of files
    size = path.stat().st_size
    if size != shard.num_bytes:
        yield f"{shard.file}: has {size} bytes, the layout has {shard.num_bytes}"
    with path.open("rb") as file:
        header = file.read(len(shard.header))
    if header != shard.header:
        first = next((i for i, (a, b) in enumerate(zip(header, shard.header, strict=False)) if a != b), len(header))
        yield f"{shard.file}: its header differs from the layout at byte {first}"


def _index_problems(directory: Path, shards: Sequence[ShardPlan]) -> list[str]:
    """The index against the layout. That none is there for a single shard is checked with the set of files."""
    path = directory / INDEX_NAME
    if len(indexed(shards)) < 2 or not path.is_file():
        return []
    return [] if _read_json(path) == index_json(shards) else [f"{INDEX_NAME}: is not the index of the layout"]


# --- configuration ---------------------------------------------------------------------------------


def _config_problems(directory: Path, expectation: Expectation) -> Iterator[str]:
    """The JSON files: as they were to be, and read rightly by every server of the layout."""
    read = {name: _read_json(directory / name) for name in expectation.files}
    for name, planned in expectation.files.items():
        found, wanted = read[name], json.loads(json_text(planned))
        keys = [key for key in {**found, **wanted} if found.get(key, _ABSENT) != wanted.get(key, _ABSENT)]
        if keys:
            yield f"{name}: does not hold what was to be written, in {', '.join(keys)}"
    config, nested = read.get(CONFIG_NAME, {}), read.get(NESTED_NAME, {})
    yield from expectation.layout.disagreements(config, nested, expectation.contents)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where it is missing or broken, which the comparison then shows."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


# --- contents --------------------------------------------------------------------------------------


@dataclass
class _Batch:
    """Tensors of one file that a thread reads one after the other."""

    shard: ShardPlan
    tensors: list[TensorPlan] = field(default_factory=list)
    num_bytes: int = 0


def _all_tensors(shards: Iterable[ShardPlan]) -> Iterator[tuple[ShardPlan, TensorPlan]]:
    return ((shard, tensor) for shard in shards for tensor in shard.tensors)


def _chosen(shards: Sequence[ShardPlan], scales: Collection[str], total: int) -> list[tuple[ShardPlan, TensorPlan]]:
    """What is read back, in file order: small scales, and of the rest everything or an even sample.

    `total`: bytes of the whole export, of which all ranks together read READ_BYTES. Even: each tensor earns its share
    of these and is read as soon as what was earned covers it, so the tensors read are spread over the whole
    checkpoint, whatever their sizes.
    """
    share, earned = min(1.0, READ_BYTES / total) if total else 1.0, 0.0
    found = []
    for shard, tensor in _all_tensors(shards):
        earned += tensor.num_bytes * share
        small_scale = tensor.name in scales and tensor.num_bytes <= SMALL_BYTES
        if share == 1.0 or small_scale:
            found.append((shard, tensor))
        elif earned >= tensor.num_bytes:
            found.append((shard, tensor))
            earned -= tensor.num_bytes
    return found


def _read_back(
    directory: Path,
    chosen: Sequence[tuple[ShardPlan, TensorPlan]],
    checksums: Mapping[str, int],
    scales: Collection[str],
    report: Report,
) -> list[str]:
    """Checksums and scales of the chosen tensors, by threads; one line per tensor that is wrong."""
    batches: list[_Batch] = []
    for shard, tensor in chosen:
        if not batches or batches[-1].shard is not shard or batches[-1].num_bytes >= BATCH_BYTES:
            batches.append(_Batch(shard))
        batches[-1].tensors.append(tensor)
        batches[-1].num_bytes += tensor.num_bytes

    def read(batch: _Batch) -> list[str]:
        try:
            runs = _runs(batch, scales)
            lines = (_run_problems(directory, batch.shard, run, checksums, scales) for run in runs)
            found = [line for of_one in lines for line in of_one]
        except OSError as error:
            found = [f"{batch.shard.file}: cannot be read back: {error}"]
        advance(batch.num_bytes)
        return found

    total = sum(batch.num_bytes for batch in batches)
    with report.progress("verify", total, "bytes") as advance, ThreadPoolExecutor(THREADS) as pool:
        return [problem for found in pool.map(read, batches) for problem in found]


def _runs(batch: _Batch, scales: Collection[str]) -> list[list[TensorPlan]]:
    """The batch's tensors, small scales that lie side by side together: there are tens of thousands of four bytes."""
    runs: list[list[TensorPlan]] = []
    end, room = -1, 0
    for tensor in batch.tensors:
        start, small = batch.shard.offsets[tensor.name], tensor.name in scales and tensor.num_bytes <= SMALL_BYTES
        if small and runs and start == end and tensor.num_bytes <= room and runs[-1][-1].dtype == tensor.dtype:
            runs[-1].append(tensor)
            room -= tensor.num_bytes
        else:
            runs.append([tensor])
            room = PIECE_BYTES - tensor.num_bytes if small else 0
        end = start + tensor.num_bytes
    return runs


def _run_problems(
    directory: Path, shard: ShardPlan, run: list[TensorPlan], checksums: Mapping[str, int], scales: Collection[str]
) -> Iterator[str]:
    """Small scales that lie side by side: read at once, and looked at one by one only if something is wrong."""
    if len(run) > 1:
        (piece,) = _pieces(directory / shard.file, shard.offsets[run[0].name], sum(t.num_bytes for t in run))
        start, sound = 0, _bad_scales(piece, run[0].dtype) == 0
        for tensor in run:
            stop = start + tensor.num_bytes
            sound = sound and zlib.crc32(piece[start:stop]) == checksums.get(tensor.name)
            start = stop
        if sound:
            return
    for tensor in run:
        yield from _tensor_problems(directory, shard, tensor, checksums, scales)


def _tensor_problems(
    directory: Path, shard: ShardPlan, tensor: TensorPlan, checksums: Mapping[str, int], scales: Collection[str]
) -> Iterator[str]:
    """One tensor's bytes on the disk against its checksum, and its values if it is a scale."""
    checksum, bad = 0, 0
    for piece in _pieces(directory / shard.file, shard.offsets[tensor.name], tensor.num_bytes):
        checksum = zlib.crc32(piece, checksum)
        bad += _bad_scales(piece, tensor.dtype) if tensor.name in scales else 0
    if checksum != checksums.get(tensor.name):
        yield f"{tensor.name}: {shard.file} does not hold the bytes that were written"
    if bad:
        yield f"{tensor.name}: {bad} scales are NaN, infinite, zero or negative"


def _pieces(path: Path, start: int, num_bytes: int) -> Iterator[memoryview]:
    """The bytes of one tensor, from the disk rather than the cache where they are on the disk."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_DONTNEED)
        buffer = memoryview(bytearray(min(PIECE_BYTES, num_bytes)))
        for done in range(0, num_bytes, PIECE_BYTES):
            part = buffer[: num_bytes - done]
            yield part[: os.preadv(file.fileno(), [part], start + done)]


def _bad_scales(piece: memoryview, dtype: str) -> int:
    """How many of these scales a server could not multiply with."""
    values = torch.frombuffer(piece, dtype=TORCH_DTYPES[dtype])
    if values.dtype == torch.uint8:
        return int((values == E8M0_NAN).sum())
    values = values.float()
    return int((~(values.isfinite() & (values > 0))).sum())


def _limited(problems: Iterable[str]) -> list[str]:
    """The first few problems of a kind, and how many more there are."""
    found = list(problems)
    more = [f"... and {len(found) - MAX_NAMED} more like these"] if len(found) > MAX_NAMED else []
    return found[:MAX_NAMED] + more
