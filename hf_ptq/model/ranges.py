"""Which bytes of the source a parameter is made of, and where in it they go.

A parameter holds one source tensor, or one tensor of each expert and projection (`MetaModel.stacking`). Stacked
parameters are [experts, rows, ...] and contiguous, so that in either case a source tensor is one contiguous range:

    first element = (expert - first expert held) * elements of one expert + first row * elements of one row

Where several ranks share a parameter, this one holds a range of its first dimension (experts of a stack, rows of a
matrix): `held` says which, for the parameters of which it is not all, and the ranges are cut to it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from hf_ptq.checkpoint.dtypes import TORCH_DTYPES
from hf_ptq.checkpoint.names import by_parameter
from hf_ptq.checkpoint.source import TensorEntry
from hf_ptq.model.build import MetaModel


@dataclass(frozen=True)
class Range:
    """Elements [skip, skip + count) of a source tensor, and the element of the flattened parameter that they go to."""

    entry: TensorEntry
    start: int
    skip: int
    count: int

    @property
    def stop(self) -> int:
        """The first element behind it."""
        return self.start + self.count

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return self.count * TORCH_DTYPES[self.entry.dtype].itemsize

    def within(self, start: int, stop: int) -> Range:
        """The part that lies in [start, stop), counted from there."""
        first, last = max(self.start, start), min(self.stop, stop)
        return Range(self.entry, first - start, self.skip + first - self.start, max(0, last - first))


def _whole(entry: TensorEntry, start: int) -> Range:
    return Range(entry, start, 0, math.prod(entry.shape))


@dataclass(frozen=True)
class Layout:
    """A parameter (or buffer) as it is allocated, and the ranges that fill it completely."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    ranges: tuple[Range, ...]


def lay_out_parameters(
    meta: MetaModel, tensors: Mapping[str, TensorEntry], held: Mapping[str, range] | None = None
) -> dict[str, Layout]:
    """Parameter -> its layout, for those that ranges of the source fill exactly. The others are not in it.

    `held`: parameter -> what this process holds of its first dimension, where that is not all.
    """
    held = held or {}
    known = meta.model.state_dict()
    found = {}
    for parameter, names in by_parameter(meta.placements).items():
        shape, entries = tuple(known[parameter].shape), [tensors[name] for name in names]
        is_stack = meta.placements[names[0]].pattern is not None
        ranges = _stacked(meta, entries, shape) if is_stack else _plain(entries, shape)
        # The whole parameter is judged, whatever share is held: were an expert missing, all behind it would move up.
        if not _fills(ranges, math.prod(shape)) or not all(part.entry.dtype in TORCH_DTYPES for part in ranges):
            continue
        if (share := held.get(parameter)) is not None:
            size, shape = math.prod(shape[1:]), (len(share), *shape[1:])
            parts = (part.within(share.start * size, share.stop * size) for part in ranges)
            ranges = [part for part in parts if part.count]
        found[parameter] = Layout(shape, _dtype_in_memory(meta, parameter, known[parameter].dtype), tuple(ranges))
    return found


def _plain(entries: list[TensorEntry], shape: tuple[int, ...]) -> list[Range]:
    return [_whole(entries[0], 0)] if len(entries) == 1 and entries[0].shape == shape else []


def _stacked(meta: MetaModel, entries: list[TensorEntry], shape: tuple[int, ...]) -> list[Range]:
    """Ranges of all experts; those of tensors that do not fit are left out, so that something is not filled."""
    rows_of = {meta.placements[entry.name].pattern: entry.shape[0] for entry in entries if entry.shape}
    ranges = []
    for entry in entries:
        placement = meta.placements[entry.name]
        joined = meta.stacking.get(placement.pattern or "", ())
        is_shaped = len(shape) == len(entry.shape) + 1 and entry.shape[1:] == shape[2:]
        if is_shaped and joined and rows_of.keys() >= set(joined):
            row = sum(rows_of[pattern] for pattern in itertools.takewhile(placement.pattern.__ne__, joined))
            ranges.append(_whole(entry, placement.position * math.prod(shape[1:]) + row * math.prod(shape[2:])))
    return ranges


def _fills(ranges: Iterable[Range], num_elements: int) -> bool:
    """Whether the ranges lie side by side from the first element to the last."""
    end = 0
    for part in sorted(ranges, key=lambda part: part.start):
        if part.start != end:
            return False
        end = part.stop
    return end == num_elements


def _dtype_in_memory(meta: MetaModel, parameter: str, built: torch.dtype) -> torch.dtype:
    """What transformers' loader makes of it: the model class may keep some parameters in fp32."""
    plan = meta.model._get_dtype_plan(meta.dtype)
    kept = (dtype for glob, dtype in plan.items() if re.search(glob.replace("*", ".*"), parameter))
    return next(kept, built)
