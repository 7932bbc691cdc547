"""Lazy tensors: what an index gives, what is read for it, and what is said of a file that changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import raw

from hf_ptq.checkpoint.headers import read_header
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import Source
from hf_ptq.errors import RunError

TENSORS = {
    "matrix": torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5).to(torch.bfloat16),
    "stack": torch.arange(4 * 3 * 6, dtype=torch.float32).reshape(4, 3, 6),
    "vector": torch.arange(11, dtype=torch.int64),
    "scalar": torch.tensor(2.5),
    "bytes": torch.arange(24, dtype=torch.uint8).reshape(4, 6),
    "codes": torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3),
    "narrow": torch.zeros(3, 0, dtype=torch.float16),
}


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[SourceReader]:
    save_file(TENSORS, tmp_path / "model.safetensors")
    entries, problem = read_header(tmp_path, "model.safetensors")
    assert problem is None
    source = Source(tmp_path, "here", None, {}, {e.name: e for e in entries}, ("model.safetensors",))
    with SourceReader(source) as opened:
        yield opened


def same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return not ours.numel() or raw(ours) == raw(theirs)


@pytest.mark.parametrize("name", TENSORS)
def test_shape_dtype_and_whole(name: str, reader: SourceReader) -> None:
    lazy, tensor = reader.tensor(name), TENSORS[name]
    assert lazy.get_shape() == list(tensor.shape)
    assert reader.bytes_read == 0, "asking for shape and dtype reads nothing"
    assert same(lazy[...], tensor)
    assert reader.bytes_read == tensor.numel() * tensor.element_size()
    if tensor.dim():
        assert same(lazy[:], tensor)


def test_dtypes_are_spelled_as_in_the_file(reader: SourceReader) -> None:
    spelled = {name: reader.tensor(name).get_dtype() for name in TENSORS}
    assert spelled == {
        "matrix": "BF16", "stack": "F32", "vector": "I64", "scalar": "F32", "bytes": "U8", "codes": "F8_E4M3",
        "flags": "BOOL", "empty": "F32", "narrow": "F16",
    }  # fmt: skip


INDICES = [
    0, 3, -1, slice(0, 2), slice(2, 4), slice(-3, -1), slice(1, None), slice(None, -1), slice(None), slice(2, 2),
    slice(3, 1), slice(0, 100), slice(-100, 2), slice(None, None, 2), slice(1, None, 3), ...,
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("name", ["matrix", "stack", "bytes", "codes"])
def test_an_index_along_the_first_dimension(name: str, index: int | slice, reader: SourceReader) -> None:
    assert same(reader.tensor(name)[index], TENSORS[name][index])


@pytest.mark.parametrize(
    "index",
    [
        (slice(1, 3), slice(0, 2)), (2, slice(1, 3)), (slice(None), 1), (2, 1), (-1, -1), (slice(1, 4), -2),
        (..., 1), (..., slice(0, 2)), (1, ...), (slice(1, 3), ...), (slice(1, 3), ..., slice(1, 2)),
        (slice(None, None, 2), slice(None, None, 2)), (slice(0, 0), 1), (...,), (slice(None), slice(None)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["matrix", "stack", "bytes"])
def test_several_indices(name: str, index: tuple, reader: SourceReader) -> None:
    assert same(reader.tensor(name)[index], TENSORS[name][index])


def test_three_indices(reader: SourceReader) -> None:
    for index in ((1, 2, 3), (slice(1, 3), 0, slice(2, 4)), (slice(None), slice(1, 2), slice(None)), (-1, ..., 5)):
        assert same(reader.tensor("stack")[index], TENSORS["stack"][index]), index


@pytest.mark.parametrize("index", [7, -8, (7, 0), (0, 5)], ids=str)
def test_an_index_out_of_range_raises(index: int | tuple, reader: SourceReader) -> None:
    with pytest.raises(IndexError):
        reader.tensor("matrix")[index]


@pytest.mark.parametrize(("index", "rows"), [
    (slice(2, 5), 3), (4, 1), ((4, slice(0, 2)), 1), ((slice(2, 5), 1), 3), (slice(5, 5), 0), (slice(-2, None), 2),
])  # fmt: skip
def test_only_the_rows_asked_for_are_read(index: int | slice | tuple, rows: int, reader: SourceReader) -> None:
    reader.tensor("matrix")[index]
    assert reader.bytes_read == rows * 5 * 2


def test_a_tensor_that_the_source_lacks(reader: SourceReader) -> None:
    with pytest.raises(KeyError):
        reader.tensor("nothing")


def test_a_file_that_shrank_names_the_tensor(reader: SourceReader) -> None:
    entry = max(reader.source.tensors.values(), key=lambda e: e.offset if e.num_bytes else 0)
    path = reader.path(entry)
    path.write_bytes(path.read_bytes()[: entry.offset + 1])
    with pytest.raises(RunError, match=rf"model\.safetensors ended inside {entry.name}: the file changed"):
        reader.tensor(entry.name)[...]


def test_the_result_is_memory_of_its_own(reader: SourceReader) -> None:
    """Not a page of the file: writing to it changes neither the file nor the next read."""
    first = reader.tensor("stack")[1:3]
    first.zero_()
    assert same(reader.tensor("stack")[1:3], TENSORS["stack"][1:3])


def test_threads_share_a_reader(reader: SourceReader) -> None:
    wrong: list[str] = []

    def read() -> None:
        wrong.extend(name for name in list(TENSORS) * 20 if not same(reader.tensor(name)[...], TENSORS[name]))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert reader.bytes_read == 8 * 20 * sum(t.numel() * t.element_size() for t in TENSORS.values())


def test_files_are_closed(tmp_path: Path, reader: SourceReader) -> None:
    reader.tensor("matrix")[...]
    assert any(str(tmp_path) in str(link.resolve()) for link in Path("/proc/self/fd").iterdir())
    reader.__exit__()
    assert not any(str(tmp_path) in str(link.resolve()) for link in Path("/proc/self/fd").iterdir())
