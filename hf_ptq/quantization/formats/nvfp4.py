"""NVFP4: E2M1 codes, an E4M3 scale per 16 inputs, one fp32 scale per tensor.

    weight_scale_2 = amax / (6 * 448)                                             (fp32; amax of the fused group)
    weight_scale   = e4m3(clamp(amax of 16 inputs / (6 * weight_scale_2), 2^-9, 448));  1.0 for a block of zeros
    code           = e2m1(weight / (weight_scale * weight_scale_2)), ties to the even code

E2M1 has the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 (codes 0..7) and a sign bit of 8 (OCP Microscaling specification 1.0).
Two codes share a byte along the inputs, the even index in the low nibble. An exact zero is code 0; a negative value
that rounds to zero is code 8. The smallest block scale is the smallest E4M3 value, so that no block decodes to zeros
because its scale vanished, and no scale exceeds 448 before the cast.
"""

from __future__ import annotations

import torch

from hf_ptq.quantization.formats.codec import Codec, Tensors, divide
from hf_ptq.quantization.formats.fp8 import E4M3, E4M3_MAX, to_e4m3

BLOCK_SIZE = 16
E2M1_MAX = 6.0
SMALLEST_SCALE = 2.0**-9
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


def global_scale(amax: torch.Tensor) -> torch.Tensor:
    """weight_scale_2 or input_scale: amax / 2688 in fp32; 1.0 where amax is zero."""
    return torch.where(amax == 0, 1.0, divide(amax.float(), E2M1_MAX * E4M3_MAX))


def block_scale(block_amax: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """E4M3 scales of blocks with the amax `block_amax` fp32, under a global scale that broadcasts to it."""
    scale = (block_amax / (E2M1_MAX * scale_2)).clamp_(SMALLEST_SCALE, E4M3_MAX)
    return to_e4m3(torch.where(block_amax == 0, 1.0, scale))


def _layout(shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    *leading, inputs = shape
    return {
        "weight": (torch.uint8, (*leading, inputs // 2)),
        "weight_scale": (E4M3, (*leading, inputs // BLOCK_SIZE)),
        "weight_scale_2": (torch.float32, shape[:-2]),
    }


def _encode(weight: torch.Tensor, amax: torch.Tensor) -> Tensors:
    """weight [..., out, in], amax [...] of the fused group."""
    scale_2 = global_scale(amax)
    blocks = weight.float().unflatten(-1, (-1, BLOCK_SIZE))
    low, high = blocks.aminmax(dim=-1)
    scale = block_scale(torch.maximum(high, -low), scale_2[..., None, None])
    step = scale.float() * scale_2[..., None, None]
    codes = e2m1_codes(blocks / step[..., None]).flatten(-2)
    return {"weight": pack_nibbles(codes), "weight_scale": scale, "weight_scale_2": scale_2}


def _decode(tensors: Tensors) -> torch.Tensor:
    step = tensors["weight_scale"].float() * tensors["weight_scale_2"][..., None, None]
    blocks = unpack_e2m1(tensors["weight"]).unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * step[..., None]).flatten(-2)


def _fake_quantize(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Activations [..., in] as a server computes with them: block scales at run time, dtype kept.

    The same numbers as decode(encode(values)), without making codes.
    """
    scale_2 = global_scale(amax)
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    low, high = blocks.aminmax(dim=-1, keepdim=True)
    step = block_scale(torch.maximum(high, -low), scale_2).float() * scale_2
    scaled = (blocks / step).clamp_(-E2M1_MAX, E2M1_MAX)
    size = scaled.abs()
    grid = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return ((scaled / grid).round_() * grid * step).flatten(-2).to(values.dtype)


CODEC = Codec(layout=_layout, encode=_encode, decode=_decode, fake_quantize=_fake_quantize, input_scale=global_scale)
