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

    from hf_ptq.quantization.formats.codec import Codec, Fused

SMALLEST_FUSED = 1 << 22  # elements; below, a model gains less than the seconds in which kernels are compiled


@cache
def codecs() -> dict[str, Codec]:
    """Format name -> its codec."""
    from hf_ptq.quantization.formats import fp8, int8, nvfp4

    return {
        "fp8": fp8.PER_TENSOR,
        "fp8_per_channel": fp8.PER_CHANNEL,
        "fp8_per_token": fp8.PER_TOKEN,
        "nvfp4": nvfp4.CODEC,
        "int8_per_channel": int8.PER_CHANNEL,
        "fp8_cast": fp8.PER_TENSOR,
        "nvfp4_cast": nvfp4.CODEC,
    }


def fused(name: str, weight: torch.Tensor) -> Fused | None:
    """The kernel that encodes `weight` in one pass, to the same bytes as the codec; None where there is none."""
    if weight.device.type != "cuda" or weight.numel() < SMALLEST_FUSED or find_spec("triton") is None:
        return None
    from hf_ptq.quantization.formats import kernels

    usable = weight.dtype in kernels.DTYPES and weight.dim() in (2, 3) and kernels.run_on(weight.device)
    return kernels.KERNELS.get(name) if usable else None
