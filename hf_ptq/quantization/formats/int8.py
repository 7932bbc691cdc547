"""INT8, symmetric: value = code * scale, scale = amax of the output row / 127.

Codes are rounded half to even and clamped to -128..127; a row of zeros gets the scale 1.0.
"""

from __future__ import annotations

import torch

from hf_ptq.quantization.formats.codec import Codec, Tensors, divide

INT8_MAX = 127.0


def _layout(shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {"weight": (torch.int8, shape), "weight_scale": (torch.float32, shape[:-1])}


def _encode(weight: torch.Tensor, amax: torch.Tensor) -> Tensors:
    """weight [..., out, in], amax [..., out]."""
    scale = torch.where(amax == 0, 1.0, divide(amax.float(), INT8_MAX))
    codes = (weight.float() / scale[..., None]).round_().clamp_(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def _decode(tensors: Tensors) -> torch.Tensor:
    return tensors["weight"].float() * tensors["weight_scale"][..., None]


PER_CHANNEL = Codec(layout=_layout, encode=_encode, decode=_decode)
