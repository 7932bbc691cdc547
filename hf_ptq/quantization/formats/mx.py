"""MX formats: a power of two scales 32 inputs (OCP Microscaling Formats specification 1.0).

    byte  = 127 + ceil(log2(amax of 32 inputs / largest)), at least 0;  0 for a block of zeros
    value = code * 2^(byte - 127)

`largest` is the element's largest value: 6 for E2M1, 28 for E3M2, 448 for E4M3, 127/64 for INT8. The specification
suggests the floor of log2(amax) less that of `largest`, which lets large values saturate; the ceiling is Model
Optimizer's rule: nothing saturates (but what would round to more than fp32 holds). Elements are rounded half to even.
The scale is stored as its exponent's byte (E8M0); 255 would be NaN and is never written.

    mxfp4   E2M1, two codes a byte, the even input in the low nibble
    mxfp6   E3M2, four codes in three bytes: 24 bits, the first input in the lowest six
    mxfp8   E4M3
    mxint8  a multiple of 1/64, code -127..127
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hf_ptq.quantization.formats.codec import Codec, Layout, Tensors, divide
from hf_ptq.quantization.formats.fp8 import E4M3, E4M3_MAX, to_e4m3
from hf_ptq.quantization.formats.nvfp4 import E2M1_MAX, e2m1_codes, pack_nibbles, round_e2m1, unpack_e2m1
from hf_ptq.quantization.formats.ranges import block_amax

BLOCK_SIZE = 32
E3M2_MAX = 28.0
BIAS = 127
SMALLEST_POWER = 0x00400000  # the bits of 2^-127 in fp32, which is subnormal


@dataclass(frozen=True)
class _Element:
    """`store`: fp32 values up to `largest` -> codes [..., in * packing]; `load`: its inverse; `rounded`: both."""

    largest: float
    dtype: torch.dtype
    packing: float  # stored elements per value
    store: Callable[[torch.Tensor], torch.Tensor]
    load: Callable[[torch.Tensor], torch.Tensor]
    rounded: Callable[[torch.Tensor], torch.Tensor]


# --- the scale -----------------------------------------------------------------------------------


def e8m0_of(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The byte of the smallest power of two p with amax <= largest * p, as far as largest * p is an fp32 number.

    Exact: of the quotient m * 2^e with m in [0.5, 1) the logarithm's ceiling is e, or e - 1 for a power of two.
    """
    quotient = divide(amax.float(), largest)
    mantissa, exponent = torch.frexp(quotient)
    ceiling = exponent - (mantissa == 0.5).int()
    highest = BIAS + math.frexp(torch.finfo(torch.float32).max / largest)[1] - 1  # at most 254
    return torch.where(quotient == 0, 0, (ceiling + BIAS).clamp_(0, highest)).to(torch.uint8)


def power_of(byte: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127) in fp32, exact on every device: the byte is put where fp32 has its exponent."""
    bits = byte.to(torch.int32)
    return torch.where(bits == 0, SMALLEST_POWER, bits << 23).view(torch.float32)


# --- elements ------------------------------------------------------------------------------------


def _e3m2_parts(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(exponent, |value| as a rounded multiple of 2^(exponent - 2)): four steps an octave, from 2^-2 on."""
    size = values.abs().clamp_(max=E3M2_MAX)
    exponent = torch.where(size == 0, -2, (torch.frexp(size).exponent - 1).clamp_(min=-2))
    return exponent, (size * power_of(BIAS + 2 - exponent)).round_()


def e3m2_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes 0..63 (uint8) of the nearest E3M2 values, ties to the even code, saturating at 28."""
    exponent, steps = _e3m2_parts(values)
    negative = (values < 0).to(torch.uint8).mul_(32)
    return ((exponent + 2) * 4 + steps.int()).to(torch.uint8).add_(negative)


def _round_e3m2(values: torch.Tensor) -> torch.Tensor:
    exponent, steps = _e3m2_parts(values)
    return (steps * power_of(BIAS - 2 + exponent)).copysign_(values)


def e3m2_values(codes: torch.Tensor) -> torch.Tensor:
    """E3M2 codes 0..63 -> fp32: bias 3, subnormal below 0.25."""
    codes = codes.int()
    field, mantissa = (codes >> 2) & 7, codes & 3
    size = (mantissa + 4 * (field > 0)).float() * power_of(BIAS - 5 + field.clamp(min=1))
    return torch.where(codes >= 32, -size, size)


def pack_sixes(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., in] of six bits -> bytes [..., in * 3 / 4], the first code in the lowest bits."""
    quads = codes.int().unflatten(-1, (-1, 4))
    word = quads[..., 0] | (quads[..., 1] << 6) | (quads[..., 2] << 12) | (quads[..., 3] << 18)
    return torch.stack([word & 255, (word >> 8) & 255, word >> 16], dim=-1).to(torch.uint8).flatten(-2)


def unpack_sixes(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_sixes`; int32 codes."""
    triples = packed.int().unflatten(-1, (-1, 3))
    word = triples[..., 0] | (triples[..., 1] << 8) | (triples[..., 2] << 16)
    return torch.stack([(word >> shift) & 63 for shift in (0, 6, 12, 18)], dim=-1).flatten(-2)


def _int8_steps(values: torch.Tensor) -> torch.Tensor:
    return (values * 64).round_().clamp_(-127, 127)


_E2M1 = _Element(E2M1_MAX, torch.uint8, 1 / 2, lambda v: pack_nibbles(e2m1_codes(v)), unpack_e2m1, round_e2m1)
_E3M2 = _Element(
    E3M2_MAX, torch.uint8, 3 / 4, lambda v: pack_sixes(e3m2_codes(v)), lambda b: e3m2_values(unpack_sixes(b)),
    _round_e3m2,
)  # fmt: skip
_E4M3 = _Element(E4M3_MAX, E4M3, 1, to_e4m3, lambda codes: codes.float(), lambda v: to_e4m3(v).float())
_INT8 = _Element(
    127 / 64, torch.int8, 1, lambda v: _int8_steps(v).to(torch.int8), lambda codes: codes.float() / 64,
    lambda v: _int8_steps(v) / 64,
)  # fmt: skip

# --- codecs --------------------------------------------------------------------------------------


def _layout(shape: tuple[int, ...], element: _Element) -> Layout:
    *leading, inputs = shape
    return {
        "weight": (element.dtype, (*leading, int(inputs * element.packing))),
        "weight_scale": (torch.uint8, (*leading, inputs // BLOCK_SIZE)),
    }


def _scaled(values: torch.Tensor, element: _Element) -> tuple[torch.Tensor, torch.Tensor]:
    """(values in units of their block's scale, fp32 [..., in]; the scales' bytes)."""
    byte = e8m0_of(block_amax(values, BLOCK_SIZE), element.largest)
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks / power_of(byte)[..., None]).flatten(-2), byte


def _times(values: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    return (values.unflatten(-1, (-1, BLOCK_SIZE)) * power_of(byte)[..., None]).flatten(-2)


def _encode(weight: torch.Tensor, _: torch.Tensor, element: _Element) -> Tensors:
    scaled, byte = _scaled(weight, element)
    return {"weight": element.store(scaled), "weight_scale": byte}


def _decode(tensors: Tensors, element: _Element) -> torch.Tensor:
    return _times(element.load(tensors["weight"]), tensors["weight_scale"])


def _fake_quantize(values: torch.Tensor, _: torch.Tensor | None, element: _Element) -> torch.Tensor:
    """Activations [..., in]: each block's scale from the block itself; dtype kept."""
    scaled, byte = _scaled(values, element)
    return _times(element.rounded(scaled), byte).to(values.dtype)


def _codec(element: _Element) -> Codec:
    return Codec(
        layout=partial(_layout, element=element),
        encode=partial(_encode, element=element),
        decode=partial(_decode, element=element),
        fake_quantize=partial(_fake_quantize, element=element),
    )


MXFP4, MXFP6, MXFP8, MXINT8 = (_codec(element) for element in (_E2M1, _E3M2, _E4M3, _INT8))
