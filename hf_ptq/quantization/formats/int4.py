"""INT4 in blocks, symmetric: value = code * scale, scale = amax of the block of inputs / 7.

Codes are rounded half to even and clamped to -8..7, in two's complement; a block of zeros gets the scale 1.0. Two rows
share their bytes: byte row r holds row 2r in the low nibble and row 2r + 1 in the high one (Model Optimizer's packing,
which TensorRT-LLM reads).

With FP8 (`w4a8`): the server multiplies INT4 weights as E4M3 numbers with E4M3 activations, and

    weight_scale_2 = amax of the fused group / 448

is the FP8 scale of the weights. Codes and block scales are those without it; it decodes nothing.
"""

from __future__ import annotations

from functools import partial

import torch

from hf_ptq.quantization.formats.codec import Codec, Layout, Tensors, scale_by
from hf_ptq.quantization.formats.fp8 import scale_of as fp8_scale_of
from hf_ptq.quantization.formats.ranges import block_amax

INT4_MAX = 7.0


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """amax / 7 in fp32; 1.0 where amax is zero."""
    return scale_by(amax, INT4_MAX)


def pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """Codes -8..7 [..., out, in] of any dtype -> bytes [..., out / 2, in], the even row in the low nibble."""
    pairs = codes.to(torch.int8).view(torch.uint8).unflatten(-2, (-1, 2))
    return (pairs[..., 0, :] & 15) | (pairs[..., 1, :] << 4)


def unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., out / 2, in] -> codes int8 [..., out, in]."""
    low, high = (packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4  # the shift keeps the sign
    return torch.stack([low, high], dim=-2).flatten(-3, -2)


def _layout(shape: tuple[int, ...], block_size: int) -> Layout:
    *leading, outputs, inputs = shape
    return {
        "weight": (torch.uint8, (*leading, outputs // 2, inputs)),
        "weight_scale": (torch.float32, (*leading, outputs, inputs // block_size)),
    }


def _encode(weight: torch.Tensor, amax: torch.Tensor) -> Tensors:
    """weight [..., out, in], amax [..., out, in / block]."""
    scale = scale_of(amax)
    return {"weight": pack_rows(_codes(weight, scale)), "weight_scale": scale}


def _codes(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    blocks = weight.float().unflatten(-1, (scale.shape[-1], -1))
    return (blocks / scale[..., None]).round_().clamp_(-8, INT4_MAX).flatten(-2)


def _decode(tensors: Tensors) -> torch.Tensor:
    codes, scale = unpack_rows(tensors["weight"]).float(), tensors["weight_scale"]
    return (codes.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


def codec_of(block_size: int) -> Codec:
    """The codec of INT4 blocks of `block_size` inputs."""
    return Codec(layout=partial(_layout, block_size=block_size), encode=_encode, decode=_decode)


FP8_BLOCK_SIZE = 128


def _fp8_layout(shape: tuple[int, ...]) -> Layout:
    return {**_layout(shape, FP8_BLOCK_SIZE), "weight_scale_2": (torch.float32, shape[:-2])}


def _fp8_encode(weight: torch.Tensor, amax: torch.Tensor) -> Tensors:
    """weight [..., out, in], amax [...] of the fused group."""
    return _fp8_encode_blocks(weight, amax, block_amax(weight, FP8_BLOCK_SIZE))


def _fp8_encode_blocks(weight: torch.Tensor, amax: torch.Tensor, blocks: torch.Tensor) -> Tensors:
    return {**_encode(weight, blocks), "weight_scale_2": fp8_scale_of(amax)}


def _round_blocks(weight: torch.Tensor, _: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    scale = scale_of(blocks)
    codes = _codes(weight, scale)
    return (codes.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


WITH_FP8 = Codec(
    layout=_fp8_layout,
    encode=_fp8_encode,
    decode=_decode,
    encode_blocks=_fp8_encode_blocks,
    round_blocks=_round_blocks,
)
