"""The parts of a weight that share a scale, by the description of its format: their ranges, and sums over them.

    amax = max |w| over the part, fp32

A part is the whole matrix, a row, a block of inputs, or a tile of rows and inputs. Tiles at the lower and right edge
may be smaller. Nothing here knows a format's arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from hf_ptq.quantization.formats.description import NumberFormat

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Ranges:
    """What a weight is encoded with: see `Codec.encode` and `Codec.encode_blocks` for the shapes; fp32."""

    amax: torch.Tensor
    block_amax: torch.Tensor | None = None

    def of_part(self, number_format: NumberFormat, index: Index) -> Ranges:
        """The ranges of weight[index]; the last slice of `index` is of rows, cut at multiples of `row_step`."""
        *leading, rows = index
        if number_format.is_shared or number_format.is_dynamic:
            amax = self.amax[tuple(leading)]
        else:
            amax = self.amax[(*leading, _blocks_of(rows, number_format.block_rows))]
        return Ranges(amax, None if self.block_amax is None else self.block_amax[index])


def _blocks_of(rows: slice, size: int) -> slice:
    """The blocks of `size` rows that hold these rows."""
    start, stop = rows.start, rows.stop
    return slice(start and start // size, stop and -(-stop // size))


def weight_amax(weight: torch.Tensor, number_format: NumberFormat) -> torch.Tensor:
    """The range of each part of weight [..., out, in]; zeros [...] for formats that take none."""
    if number_format.is_dynamic:
        return weight.new_zeros(weight.shape[:-2], dtype=torch.float32)
    if number_format.is_shared:
        return _amax(weight).amax(-1)
    if number_format.granularity == "channel":
        return _amax(weight)
    tiled = tiles(weight, number_format.block_rows, number_format.input_multiple)
    return _amax(tiled).amax(-1)


def sums_of_parts(values: torch.Tensor, number_format: NumberFormat) -> torch.Tensor:
    """The sum over each row, block or tile of values [..., out, in], fp64; over blocks also under a global scale."""
    if number_format.granularity == "channel":
        return values.sum(-1, dtype=torch.float64)
    if number_format.block_rows == 1:
        return values.unflatten(-1, (-1, number_format.input_multiple)).sum(-1, dtype=torch.float64)
    tiled = tiles(values, number_format.block_rows, number_format.input_multiple)
    return tiled.sum((-1, -2), dtype=torch.float64)


def block_amax(weight: torch.Tensor, block_size: int) -> torch.Tensor:
    """The range of each block of inputs: weight [..., in] -> fp32 [..., in / block_size]."""
    return _amax(weight.unflatten(-1, (-1, block_size)))


def _amax(values: torch.Tensor) -> torch.Tensor:
    """max |v| over the last dimension, fp32."""
    low, high = values.aminmax(dim=-1)
    return torch.maximum(high, -low).float()


def tiles(weight: torch.Tensor, rows: int, inputs: int) -> torch.Tensor:
    """weight [..., out, in] -> [..., tiles, tiles, rows, inputs], zeros beyond the edges; a view where it can be."""
    below, right = -weight.shape[-2] % rows, -weight.shape[-1] % inputs
    whole = pad(weight, (0, right, 0, below)) if below or right else weight
    return whole.unflatten(-1, (-1, inputs)).unflatten(-3, (-1, rows)).transpose(-3, -2)


def from_tiles(tiled: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `tiles`: the matrix, cut to `shape`."""
    whole = tiled.transpose(-3, -2).flatten(-4, -3).flatten(-2)
    return whole[..., : shape[-2], : shape[-1]]


def parts(shape: tuple[int, ...], elements: int, row_step: int) -> Iterator[Index]:
    """Indices that cut [out, in] into blocks of rows and [experts, out, in] into blocks of experts or of rows.

    Each has about `elements` elements; rows are cut at multiples of `row_step`. The last slice is always of rows.
    """
    matrix = shape[-2] * shape[-1]
    if len(shape) == 3 and matrix <= elements:
        step = max(1, elements // max(1, matrix))
        yield from ((slice(start, start + step), slice(None)) for start in range(0, shape[0], step))
        return
    step = max(1, elements // max(1, shape[-1] * row_step)) * row_step
    rows = [slice(start, start + step) for start in range(0, shape[-2], step)]
    if len(shape) == 2:
        yield from ((r,) for r in rows)
    else:
        yield from ((slice(e, e + 1), r) for e in range(shape[0]) for r in rows)
