"""Ranges of bytes as pure numbers: cut into reads, joined to copies, and as far as they lie in a window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_ptq.checkpoint.source import TensorEntry
from hf_ptq.model import fill
from hf_ptq.model.ranges import Range


def test_cuts_fall_between_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 5 bytes of another tensor, a cut is still at a multiple of 8 bytes of the tensor."""
    monkeypatch.setattr(fill, "CHUNK", 32)
    odd, wide = TensorEntry("odd", "f", "U8", (5,), 100, 5), TensorEntry("wide", "f", "F64", (9,), 105, 72)
    targets = [(Range(wide, 0, 0, 9), torch.empty(9, dtype=torch.bfloat16))]
    targets += [(Range(odd, 0, 0, 5), torch.empty(5, dtype=torch.uint8))]
    chunks = list(fill._cut(targets))
    assert [[(p.entry.name, p.start, p.num_bytes) for p in c] for c in chunks] == [
        [("odd", 0, 5), ("wide", 0, 24)],
        [("wide", 24, 32)],
        [("wide", 56, 16)],
    ]
    assert [p.target.numel() for c in chunks for p in c] == [5, 3, 4, 2]


def test_a_part_of_a_tensor_is_read_from_its_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that do not touch are two reads; a tensor's end and the next one's beginning are one."""
    monkeypatch.setattr(fill, "CHUNK", 1 << 20)
    first, second = TensorEntry("first", "f", "BF16", (10,), 100, 20), TensorEntry("second", "f", "F32", (4,), 120, 16)
    parts = [Range(second, 9, 0, 2), Range(first, 0, 1, 3), Range(first, 3, 6, 4)]
    chunks = list(fill._cut((part, torch.empty(part.count, dtype=torch.float32)) for part in parts))
    assert [[(p.entry.name, p.offset, p.end, p.target.numel()) for p in c] for c in chunks] == [
        [("first", 102, 108, 3)],
        [("first", 112, 120, 4), ("second", 120, 128, 2)],
    ]


def test_what_lies_side_by_side_on_both_sides_is_one_copy() -> None:
    """Not across parameters, though their memory may touch by chance; and not where the dtype changes."""
    memory = bytearray(64)
    stack = torch.frombuffer(memory, dtype=torch.bfloat16, count=16)
    behind = torch.frombuffer(memory, dtype=torch.bfloat16, count=4, offset=32)
    assert behind.data_ptr() == stack.data_ptr() + stack.nbytes
    entries = [TensorEntry(name, "f", "BF16", (4,), 8 * i, 8) for i, name in enumerate("abcd")]
    entries.append(TensorEntry("wide", "f", "F32", (4,), 32, 16))
    targets = [stack[0:4], stack[4:8], stack[12:16], behind, stack[8:12]]
    pieces = [fill._Piece(entry, 0, entry.num_bytes, to) for entry, to in zip(entries, targets, strict=True)]
    runs = [([piece.entry.name for piece in run], target) for run, target in fill._runs(pieces)]
    assert [names for names, _ in runs] == [["a", "b"], ["c"], ["d"], ["wide"]]
    assert [(t.data_ptr() - stack.data_ptr(), t.numel()) for _, t in runs] == [(0, 8), (24, 4), (32, 4), (16, 4)]


@given(st.tuples(*[st.integers(0, 12)] * 5))
def test_a_range_is_cut_as_a_list_is(numbers: tuple[int, ...]) -> None:
    """What of elements [start, start + count) of a parameter lies in a window, counted from the window's start."""
    start, skip, count, first, length = numbers
    entry = TensorEntry("t", "f", "F32", (40,), 0, 160)
    parameter = [None] * start + list(range(skip, skip + count)) + [None] * 40
    part = Range(entry, start, skip, count).within(first, first + length)
    expected = parameter[first : first + length]
    assert part.count == sum(element is not None for element in expected)
    assert part.num_bytes == 4 * part.count
    if part.count:
        assert expected[part.start : part.stop] == list(range(part.skip, part.skip + part.count))
