"""Number formats: `CODECS[name]` is the arithmetic of `description.FORMATS[name]`.

A new format is an entry in `description.py`, a codec in a file beside it and a line in `codecs()`. This file
imports no torch by itself (recipes are validated without it); `codecs()` does, once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_ptq.quantization.formats.codec import Codec


@cache
def codecs() -> dict[str, Codec]:
    """Format name -> its codec."""
    from hf_ptq.quantization.formats import fp8, int8, nvfp4

    return {
        "fp8": fp8.PER_TENSOR,
        "fp8_per_channel": fp8.PER_CHANNEL,
        "fp8_per_token": fp8.PER_TOKEN,
        "nvfp4": nvfp4.CODEC,
        "int8": int8.PER_TENSOR,
        "int8_per_channel": int8.PER_CHANNEL,
        "fp8_cast": fp8.PER_TENSOR,
        "nvfp4_cast": nvfp4.CODEC,
    }
