"""FP8 (E4M3): value = code * scale, scale = amax / 448.

E4M3 is torch's `float8_e4m3fn` (OCP 8-bit floating point specification 1.0): largest value 448, smallest subnormal
2^-9, no infinity. The quotient is taken in fp32, so a code is the nearest one (the peer divides in bf16 and rounds
twice). Values are clamped *before* the cast: torch 2.11 casts what is beyond 464 to NaN, newer builds saturate.
A range of zero gives the scale 1.0: servers divide by it.

A scale is of a tensor, of an output row, of a token, or of a tile of 128 x 128 (block FP8). The scales of tiles are
stored as [ceil(out / 128), 1, ceil(in / 128), 1], as Model Optimizer does; tiles at the edges may be smaller.
"""

from __future__ import annotations

import torch

from hf_ptq.quantization.formats.codec import Codec, Layout, Tensors, scale_by
from hf_ptq.quantization.formats.ranges import from_tiles, tiles

E4M3_MAX = 448.0
E4M3 = torch.float8_e4m3fn
TILE = 128


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 code of fp32 `values`, saturating at +-448; float8_e4m3fn of the same shape."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """amax / 448 in fp32; 1.0 where amax is zero."""
    return scale_by(amax, E4M3_MAX)


def _tensor_layout(shape: tuple[int, ...]) -> Layout:
    return {"weight": (E4M3, shape), "weight_scale": (torch.float32, shape[:-2])}


def _channel_layout(shape: tuple[int, ...]) -> Layout:
    return {"weight": (E4M3, shape), "weight_scale": (torch.float32, shape[:-1])}


def _encode_tensor(weight: torch.Tensor, amax: torch.Tensor) -> Tensors:
    """One scale per matrix: weight [..., out, in], amax [...]."""
    scale = scale_of(amax)
    return {"weight": to_e4m3(weight.float() / scale[..., None, None]), "weight_scale": scale}


def _decode_tensor(tensors: Tensors) -> torch.Tensor:
    return tensors["weight"].float() * tensors["weight_scale"][..., None, None]


def _encode_channel(weight: torch.Tensor, amax: torch.Tensor) -> Tensors:
    """One scale per output row: weight [..., out, in], amax [..., out]."""
    scale = scale_of(amax)
    return {"weight": to_e4m3(weight.float() / scale[..., None]), "weight_scale": scale}


def _decode_channel(tensors: Tensors) -> torch.Tensor:
    return tensors["weight"].float() * tensors["weight_scale"][..., None]


def _tile_layout(shape: tuple[int, ...]) -> Layout:
    *leading, outputs, inputs = shape
    return {
        "weight": (E4M3, shape),
        "weight_scale": (torch.float32, (*leading, -(-outputs // TILE), 1, -(-inputs // TILE), 1)),
    }


def _encode_tiles(weight: torch.Tensor, amax: torch.Tensor) -> Tensors:
    """One scale per tile: weight [..., out, in], amax [..., tiles, tiles]."""
    scale = scale_of(amax)
    codes = to_e4m3(tiles(weight.float(), TILE, TILE) / scale[..., None, None])
    return {"weight": from_tiles(codes, weight.shape).contiguous(), "weight_scale": scale[..., None, :, None]}


def _decode_tiles(tensors: Tensors) -> torch.Tensor:
    codes, scale = tensors["weight"].float(), tensors["weight_scale"][..., 0, :, 0]
    return from_tiles(tiles(codes, TILE, TILE) * scale[..., None, None], codes.shape)


def _fake_quantize_tensor(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Values as a server computes with them: rounded to E4M3 with the static scale; dtype kept."""
    scale = scale_of(amax)
    return (to_e4m3(values.float() / scale).float() * scale).to(values.dtype)


def _fake_quantize_token(values: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """One scale per token (row of the last dimension), from the token itself; `amax` is not used."""
    scale = scale_of(values.abs().amax(-1, keepdim=True))
    return (to_e4m3(values.float() / scale).float() * scale).to(values.dtype)


PER_TENSOR = Codec(
    layout=_tensor_layout,
    encode=_encode_tensor,
    decode=_decode_tensor,
    fake_quantize=_fake_quantize_tensor,
    input_scale=scale_of,
)
PER_CHANNEL = Codec(layout=_channel_layout, encode=_encode_channel, decode=_decode_channel)
PER_TILE = Codec(layout=_tile_layout, encode=_encode_tiles, decode=_decode_tiles)
PER_TOKEN = Codec(fake_quantize=_fake_quantize_token)
