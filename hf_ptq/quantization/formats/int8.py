"""INT8, symmetric: value = code * scale, scale = amax / 127, of an output row or of the whole tensor.

Codes are rounded half to even and clamped to -128..127; a range of zero gets the scale 1.0.
"""

from __future__ import annotations

import torch

from hf_ptq.quantization.formats.codec import Codec, Tensors, divide

INT8_MAX = 127.0


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """amax / 127 in fp32; 1.0 where amax is zero."""
    return torch.where(amax == 0, 1.0, divide(amax.float(), INT8_MAX))


def _layout(shape: tuple[int, ...]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {"weight": (torch.int8, shape), "weight_scale": (torch.float32, shape[:-1])}


def _encode(weight: torch.Tensor, amax: torch.Tensor) -> Tensors:
    """weight [..., out, in], amax [..., out]."""
    scale = scale_of(amax)
    codes = (weight.float() / scale[..., None]).round_().clamp_(-128, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scale}


def _decode(tensors: Tensors) -> torch.Tensor:
    return tensors["weight"].float() * tensors["weight_scale"][..., None]


def _fake_quantize(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Values as a server computes with them, with one static scale; dtype kept."""
    scale = scale_of(amax)
    return ((values.float() / scale).round_().clamp_(-128, 127) * scale).to(values.dtype)


PER_CHANNEL = Codec(layout=_layout, encode=_encode, decode=_decode)
PER_TENSOR = Codec(fake_quantize=_fake_quantize, input_scale=scale_of)
