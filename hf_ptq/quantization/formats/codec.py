"""What the arithmetic of a number format consists of: pure functions on tensors and small dicts of tensors.

The dict holds what is stored for one weight, by the names that the tensors have behind the module's name. Leading
dimensions are stacked matrices (experts): every function treats [E, out, in] as E matrices with states of their own.
No function knows a module, a path or a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Fused = Callable[[torch.Tensor, torch.Tensor, Tensors, bool], tuple[torch.Tensor, torch.Tensor]]
"""`fused(weight, amax, stored, keep_rounded)`: encode weight [..., out, in] into the tensors of `stored`, allocated as
`layout` says, and leave decode(encode(w)) in its place where `keep_rounded`. Returns the sums of w^2 and
(decoded - w)^2, fp64, one per matrix. The bytes are those of `encode` and `decode`."""


def divide(values: torch.Tensor, number: float) -> torch.Tensor:
    """values / number, correctly rounded: by a Python number CUDA multiplies with the reciprocal, one step off."""
    return values / values.new_full((), number)


def scale_by(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The scale that maps a range to the largest code: amax / largest in fp32; 1.0 where that is zero."""
    scale = divide(amax.float(), largest)
    return torch.where(scale == 0, 1.0, scale)


def _not_a_weight_format(*_: object) -> Tensors:
    raise NotImplementedError("this format stores no weights")


def _not_an_input_format(*_: object) -> torch.Tensor:
    raise NotImplementedError("this format quantizes no activations")


def _no_layout(_: tuple[int, ...]) -> Layout:
    raise NotImplementedError("this format stores no weights")


def _no_input_scale(_: torch.Tensor) -> torch.Tensor | None:
    return None


def _as_it_is(values: torch.Tensor) -> torch.Tensor:
    return values


@dataclass(frozen=True)
class Codec:
    """The functions of one number format.

    `layout(shape)`: local name -> (dtype, shape) of what `encode` returns for a weight of that shape.
    `encode(weight, amax)`: weight [..., out, in] of any float dtype -> the stored tensors; amax fp32 as
    `ranges.weight_amax` has it: [...] for formats with a scale per tensor or a global scale, [..., out] for a scale
    per row, [..., blocks of rows, blocks of inputs] for block scales alone. `decode` is its inverse, to fp32.
    `encode_blocks(weight, amax, block_amax)`: formats with block scales under a global one, with block ranges
    [..., out, in / block] that an algorithm chose in place of the blocks' own; None for the others.
    `round_blocks`, with the same arguments: what decodes from it, fp32, without making codes. `scale_sweep(amax,
    block_amax)`: the block ranges that give each block every scale that may serve it; None where scales are no floats.
    `fake_quantize(values, amax)`: activations rounded as a server rounds them. `input_scale(amax)`: the stored
    static scale of an activation, None where scales are made at run time. `observed(values)`: what the range of
    activations is taken of.
    """

    layout: Callable[[tuple[int, ...]], Layout] = _no_layout
    encode: Callable[[torch.Tensor, torch.Tensor], Tensors] = _not_a_weight_format
    decode: Callable[[Tensors], torch.Tensor] = _not_an_input_format
    encode_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors] | None = None
    scale_sweep: Callable[[torch.Tensor, torch.Tensor], Iterator[torch.Tensor]] | None = None
    round_blocks: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = _not_an_input_format
    fake_quantize: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _not_an_input_format
    input_scale: Callable[[torch.Tensor], torch.Tensor | None] = _no_input_scale
    observed: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
