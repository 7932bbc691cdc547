"""Number formats: `CODECS[name]` is the arithmetic of `description.FORMATS[name]`.

A new format is an entry in `description.py`, a codec in a file beside it and a line in `codecs()`; a kernel for it
(kernels.py) is a matter of speed alone. This file imports no torch by itself (recipes are validated without it);
`codecs()` does, once, and `fused()` imports Triton where there is something to encode on a GPU.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from hf_ptq.quantization.formats.codec import Codec, Fused, Tensors
    from hf_ptq.quantization.formats.description import NumberFormat
    from hf_ptq.quantization.formats.ranges import Ranges

SMALLEST_FUSED = 1 << 22  # elements; below, a model gains less than the seconds in which kernels are compiled


@cache
def codecs() -> dict[str, Codec]:
    """Format name -> its codec."""
    from hf_ptq.quantization.formats import fp8, int4, int8, mx, nvfp4

    return {
        "fp8": fp8.PER_TENSOR,
        "fp8_per_channel": fp8.PER_CHANNEL,
        "fp8_per_token": fp8.PER_TOKEN,
        "fp8_2d": fp8.PER_TILE,
        "int8_per_channel": int8.PER_CHANNEL,
        "int8": int8.PER_TENSOR,
        "int8_per_token": int8.PER_TOKEN,
        "int4_block32": int4.codec_of(32),
        "int4_block64": int4.codec_of(64),
        "int4_block128": int4.codec_of(128),
        "int4_block128_fp8": int4.WITH_FP8,
        "nvfp4": nvfp4.CODEC,
        "nvfp4_static": nvfp4.CODEC,
        "nvfp4_four_over_six": nvfp4.FOUR_OVER_SIX,
        "nvfp4_block32": nvfp4.BLOCK_32,
        "nvfp4_block32_fp8": nvfp4.BLOCK_32_FP8,
        "mxfp4": mx.MXFP4,
        "mxfp6": mx.MXFP6,
        "mxfp8": mx.MXFP8,
        "mxint8": mx.MXINT8,
        "fp8_cast": fp8.PER_TENSOR,
        "nvfp4_cast": nvfp4.CODEC,
        "fp8_affine": fp8.PER_TENSOR,
        "nvfp4_affine": nvfp4.CODEC,
        "nvfp4_rotate": nvfp4.ROTATED,
    }


def encode(number_format: NumberFormat, weight: torch.Tensor, ranges: Ranges) -> Tensors:
    """The stored tensors of weight [..., out, in]: with the ranges of its blocks where these were chosen."""
    codec = codecs()[number_format.name]
    if ranges.block_amax is None:
        return codec.encode(weight, ranges.amax)
    assert codec.encode_blocks is not None, f"{number_format.name} takes no block ranges"
    return codec.encode_blocks(weight, ranges.amax, ranges.block_amax)


@cache
def kernels_run_on(device: torch.device) -> bool:
    """True where Triton kernels can be compiled for `device` and launched there."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    from hf_ptq.quantization.formats import kernels

    return kernels.run_on(device)


def fused(name: str, weight: torch.Tensor) -> Fused | None:
    """The kernel that encodes `weight` in one pass, to the same bytes as the codec; None where there is none."""
    if weight.numel() < SMALLEST_FUSED or weight.dim() not in (2, 3) or not kernels_run_on(weight.device):
        return None
    from hf_ptq.quantization.formats import kernels

    return kernels.KERNELS.get(name) if weight.dtype in kernels.DTYPES else None
