"""INT8, symmetric: value = code * scale, scale = amax / 127.

Weights have a scale per output row; activations one for all (static), or one per token. Codes are rounded half to
even and clamped to -128..127; a range of zero gives the scale 1.0.
"""

from __future__ import annotations

import torch

from hf_ptq.quantization.formats.codec import Codec, Layout, Tensors, scale_by

INT8_MAX = 127.0


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """amax / 127 in fp32; 1.0 where amax is zero."""
    return scale_by(amax, INT8_MAX)


def _layout(shape: tuple[int, ...]) -> Layout:
    return {"weight": (torch.int8, shape), "weight_scale": (torch.float32, shape[:-1])}


def _encode(weight: torch.Tensor, amax: torch.Tensor) -> Tensors:
    """weight [..., out, in], amax [..., out]."""
    scale = scale_of(amax)
    return {"weight": _codes(weight, scale[..., None]).to(torch.int8), "weight_scale": scale}


def _codes(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values.float() / scale).round_().clamp_(-128, 127)


def _decode(tensors: Tensors) -> torch.Tensor:
    return tensors["weight"].float() * tensors["weight_scale"][..., None]


def _fake_quantize_tensor(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Values as a server computes with them: rounded with the static scale; dtype kept."""
    scale = scale_of(amax)
    return (_codes(values, scale) * scale).to(values.dtype)


def _fake_quantize_token(values: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """One scale per token (row of the last dimension), from the token itself; `amax` is not used."""
    scale = scale_of(values.abs().amax(-1, keepdim=True))
    return (_codes(values, scale) * scale).to(values.dtype)


PER_CHANNEL = Codec(layout=_layout, encode=_encode, decode=_decode)
PER_TENSOR = Codec(fake_quantize=_fake_quantize_tensor, input_scale=scale_of)
PER_TOKEN = Codec(fake_quantize=_fake_quantize_token)
