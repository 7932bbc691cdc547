"""NVFP4: E2M1 codes, an E4M3 scale per 16 inputs, one fp32 scale per tensor.

    weight_scale_2 = amax / (6 * 448)                                             (fp32; amax of the fused group)
    weight_scale   = e4m3(clamp(amax of 16 inputs / (6 * weight_scale_2), 2^-9, 448));  1.0 for a block of zeros
    code           = e2m1(weight / (weight_scale * weight_scale_2)), ties to the even code

E2M1 has the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 (codes 0..7) and a sign bit of 8 (OCP Microscaling specification 1.0).
Two codes share a byte along the inputs, the even index in the low nibble. An exact zero is code 0; a negative value
that rounds to zero is code 8. The smallest block scale is the smallest E4M3 value, so that no block decodes to zeros
because its scale vanished, and no scale exceeds 448 before the cast.

Variants differ in the block and in the largest block scale, the `ceiling` in weight_scale_2 = amax / (6 * ceiling):

    nvfp4, nvfp4_static   16   448
    nvfp4_four_over_six   16   256: a block may map its largest value to 4 instead of 6, with a scale 1.5 times as
                               large, which must fit into E4M3 (Cook et al., Four Over Six, 2025)
    nvfp4_block32         32   448
    nvfp4_block32_fp8     32   448 / 6: weight_scale_2 = amax / 448, so that the weights, which the server computes
                               with as FP8, fit into E4M3 (Model Optimizer's W4A8_NVFP4_FP8)

nvfp4_rotate rotates rows by a Hadamard matrix first (and back after rounding): outliers are spread over the row. The
rotation is orthogonal and symmetric, so that rounding rotated keys and turning them back is what a server computes
that rotates queries and keys. Sizes that are no power of two are rotated in blocks of their largest such divisor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from hf_ptq.quantization.formats.codec import Codec, Layout, Tensors, scale_by
from hf_ptq.quantization.formats.fp8 import E4M3, E4M3_MAX, to_e4m3
from hf_ptq.quantization.formats.ranges import block_amax

BLOCK_SIZE = 16
E2M1_MAX = 6.0
SMALLEST_SCALE = 2.0**-9
LARGEST_CODE = 126  # of E4M3: 448
SMALLEST_STEP = 2.0**-149  # the smallest fp32 number
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8) of the nearest E2M1 values, ties to the even code, saturating at 6.

    The positive values step by 0.5 up to 2, by 1 up to 4 and by 2 up to 6, so that a code is a rounded multiple of
    the step plus a constant: 2|x|, |x| + 2 and |x| / 2 + 4, and rounding half to even there is ties to even codes.
    """
    size = values.abs().clamp_(max=E2M1_MAX)
    scaled = torch.where(size < 2, size * 2, torch.where(size < 4, size, size * 0.5)).round_()
    offset = (size >= 2).to(torch.uint8).mul_(2) + (size >= 4).to(torch.uint8).mul_(2)
    negative = (values < 0).to(torch.uint8).mul_(8)
    return scaled.to(torch.uint8).add_(offset).add_(negative)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., in] -> bytes [..., in / 2], the even index in the low nibble."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., in / 2] -> E2M1 values fp32 [..., in]."""
    signed = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=packed.device)
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack([signed[byte & 15], signed[byte >> 4]], dim=-1)  # [256, 2]
    return pairs[packed.int()].flatten(-2)


def round_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 values of fp32 `values`, as `e2m1_codes` rounds."""
    size = values.abs().clamp_(max=E2M1_MAX)
    grid = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (size / grid).round_().mul_(grid).copysign_(values)


def global_scale(amax: torch.Tensor, ceiling: float = E4M3_MAX) -> torch.Tensor:
    """weight_scale_2 or input_scale: amax / (6 * ceiling) in fp32; 1.0 where amax is zero."""
    return scale_by(amax, E2M1_MAX * ceiling)


def block_scale(block_amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """E4M3 scales of blocks with the amax `block_amax` fp32, under a global scale that broadcasts to it."""
    scale = (block_amax / (E2M1_MAX * scale_2)).clamp_(SMALLEST_SCALE, E4M3_MAX)
    return to_e4m3(torch.where(block_amax == 0, 1.0, scale))


def _layout(shape: tuple[int, ...], block_size: int) -> Layout:
    *leading, inputs = shape
    return {
        "weight": (torch.uint8, (*leading, inputs // 2)),
        "weight_scale": (E4M3, (*leading, inputs // block_size)),
        "weight_scale_2": (torch.float32, shape[:-2]),
    }


def _encode(weight: torch.Tensor, amax: torch.Tensor, block_size: int, ceiling: float) -> Tensors:
    """weight [..., out, in], amax [...] of the fused group."""
    return _encode_blocks(weight, amax, block_amax(weight, block_size), ceiling)


def _encode_blocks(weight: torch.Tensor, amax: torch.Tensor, ranges: torch.Tensor, ceiling: float) -> Tensors:
    """The same with the ranges [..., out, in / block] of the blocks."""
    scale_2 = global_scale(amax, ceiling)
    scale = block_scale(ranges, scale_2[..., None, None])
    step = scale.float() * scale_2[..., None, None]
    codes = e2m1_codes(_in_steps(weight, step)).flatten(-2)
    return {"weight": pack_nibbles(codes), "weight_scale": scale, "weight_scale_2": scale_2}


def _in_steps(weight: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """weight [..., in] / step [..., blocks] -> [..., blocks, block]. A step may vanish under tiny global scales."""
    return weight.float().unflatten(-1, (step.shape[-1], -1)) / step.clamp(min=SMALLEST_STEP)[..., None]


def _round_blocks(weight: torch.Tensor, amax: torch.Tensor, ranges: torch.Tensor, ceiling: float) -> torch.Tensor:
    scale_2 = global_scale(amax, ceiling)[..., None, None]
    step = block_scale(ranges, scale_2).float() * scale_2
    return (round_e2m1(_in_steps(weight, step)) * step[..., None]).flatten(-2)


def _scale_sweep(amax: torch.Tensor, ranges: torch.Tensor, ceiling: float) -> Iterator[torch.Tensor]:
    """The block ranges of E4M3 scales around each block's own, which are consecutive codes, eight an octave.

    Of the 126 scales no other can have a smaller error. Half the own scale or less: the largest value, clipped, costs
    nine of its squared steps, and the 15 others can gain a quarter each. Twice the own scale or more: no value is above
    three steps, and half that scale has these steps too; unless half of it is no E4M3 number, below code 16.
    """
    scale_2 = global_scale(amax, ceiling)[..., None, None]
    own = block_scale(ranges, scale_2).view(torch.uint8).int()
    for offset in range(-9, 17):
        scale = (own + offset).clamp_(1, LARGEST_CODE).to(torch.uint8).view(E4M3)
        yield scale.float() * (E2M1_MAX * scale_2)


def _decode(tensors: Tensors) -> torch.Tensor:
    step = tensors["weight_scale"].float() * tensors["weight_scale_2"][..., None, None]
    blocks = unpack_e2m1(tensors["weight"]).unflatten(-1, (step.shape[-1], -1))
    return (blocks * step[..., None]).flatten(-2)


def _fake_quantize(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Activations [..., in] as a server computes with them: block scales at run time, dtype kept.

    The same numbers as decode(encode(values)), without making codes.
    """
    scale_2 = global_scale(amax)
    step = block_scale(block_amax(values, BLOCK_SIZE), scale_2).float() * scale_2
    return (round_e2m1(_in_steps(values, step)) * step[..., None]).flatten(-2).to(values.dtype)


# --- rotation ------------------------------------------------------------------------------------


def rotated(values: torch.Tensor) -> torch.Tensor:
    """Rows [..., n] times the normalised Hadamard matrix (Sylvester's), by sums and differences; its own inverse."""
    size = values.shape[-1] & -values.shape[-1]  # the largest power of two that divides the row
    out, width = values.float().unflatten(-1, (-1, size)), 1
    while width < size:
        pairs = out.unflatten(-1, (-1, 2, width))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        width *= 2
    return (out * size**-0.5).flatten(-2).to(values.dtype)


def _fake_quantize_rotated(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    return rotated(_fake_quantize(rotated(values.float()), amax)).to(values.dtype)


# --- codecs --------------------------------------------------------------------------------------


def _codec(block_size: int = BLOCK_SIZE, ceiling: float = E4M3_MAX) -> Codec:
    """A variant for weights."""
    return Codec(
        layout=partial(_layout, block_size=block_size),
        encode=partial(_encode, block_size=block_size, ceiling=ceiling),
        decode=_decode,
        encode_blocks=partial(_encode_blocks, ceiling=ceiling),
        round_blocks=partial(_round_blocks, ceiling=ceiling),
        scale_sweep=partial(_scale_sweep, ceiling=ceiling),
    )


CODEC = replace(_codec(), fake_quantize=_fake_quantize, input_scale=global_scale)
FOUR_OVER_SIX = _codec(ceiling=256.0)
BLOCK_32 = _codec(32)
BLOCK_32_FP8 = _codec(32, E4M3_MAX / E2M1_MAX)
ROTATED = Codec(fake_quantize=_fake_quantize_rotated, input_scale=global_scale, observed=rotated)
