"""Triton kernels that quantize a weight in one pass over memory: encode, decode, measure, and leave it rounded.

A kernel reads a tile of a matrix once and writes its codes and scales, the rounded tile back in place where wanted, and
the tile's sums of w^2 and (decoded - w)^2. The codecs beside this file are the reference, bit for bit. Hence:

- Scales of whole matrices and rows are made by the codec's own functions; there are few of them.
- Quotients are correctly rounded, where Triton's `/` is an approximation. The hardware's exact division (`div_rn`) is a
  dozen instructions and a branch; a tile divides by few numbers, so it takes their reciprocals once and corrects each
  quotient twice (`_quotient`). Ranges in which a step of that could underflow are left to `div_rn`.
- Denormals are kept, and no product and sum is contracted to a fused multiply-add that is not written as one.
- E2M1 is rounded by adding and subtracting 2^22, 2^23 or 2^24: beside these, fp32 numbers lie 0.5, 1 and 2 apart, as
  E2M1's do below 2, 4 and 6, and the addition rounds half to even. E4M3 likewise, in eighths of a power of two.
- The hardware's cast to E4M3 is not used: where its result was both stored and decoded, ptxas 12.8 (Triton 3.6) packed
  two casts for the store and decoded a register that held neither. The bytes were right, the sums of errors were not.

The sums of tiles are fp32 and meet in fp64, in a fixed order, so that they are the same in every run.

Needs NVIDIA's compute capability 8.9 or more, below which Triton has no E4M3. Nothing here chooses between kernel and
codec: `formats.fused` does.
"""
# Triton comes with CUDA builds of torch only, and its language is not quite Python's.
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

import subprocess
import warnings
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from hf_ptq.quantization.formats.codec import Fused, Tensors
from hf_ptq.quantization.formats.fp8 import scale_of
from hf_ptq.quantization.formats.nvfp4 import global_scale

TILE_ROWS = tl.constexpr(16)
TILE_COLUMNS = tl.constexpr(256)
E4M3_MAX = tl.constexpr(448.0)
SMALLEST_E4M3 = tl.constexpr(2.0**-6)  # that is normal
EIGHTHS = tl.constexpr(2.0**20)  # times a power of two: there, fp32 numbers lie an eighth of that power apart
BIAS = tl.constexpr(2.0**-120)  # fp32's exponents are biased by 127, E4M3's by 7
BLOCK = tl.constexpr(16)
E2M1_MAX = tl.constexpr(6.0)
SMALLEST_SCALE = tl.constexpr(2.0**-9)
HALF_STEPS = tl.constexpr(2.0**22)  # beside it, fp32 numbers are half a unit apart
EXPONENT = tl.constexpr(0x7F800000)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
SIGN = tl.constexpr(-(2**31))
# Between these a divisor's reciprocal is normal, and the remainder of every quotient whose code is not 0 is exact.
SMALLEST_DIVISOR = tl.constexpr(2.0**-80)
LARGEST_DIVISOR = tl.constexpr(2.0**80)
NUM_WARPS = 4  # 32 weights a thread
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": False, "enable_reflect_ftz": False}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FIRST_CAPABILITY = (8, 9)


@triton.jit
def _tile(shape: tl.tuple, per: tl.constexpr) -> tl.tuple:
    """Rows [rows, 1] and columns [1, columns] of this tile where `per` inputs share an entry; what of it is inside."""
    rows, columns = shape
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tl.program_id(0) * (TILE_COLUMNS // per) + tl.arange(0, TILE_COLUMNS // per)[None, :]
    return row, column, (row < rows) & (column < columns // per)


@triton.jit
def _in_weight(shape: tl.tuple, strides: tl.tuple) -> tl.tuple:
    """Where this tile lies in the weight, which may be a view, and what of it is inside."""
    of_matrix, of_row, of_column = strides
    row, column, inside = _tile(shape, 1)
    place = tl.program_id(2).to(tl.int64) * of_matrix + row.to(tl.int64) * of_row + column.to(tl.int64) * of_column
    return place, inside


@triton.jit
def _in_stored(shape: tl.tuple, per: tl.constexpr) -> tl.tuple:
    """Where the tile's entries lie in a contiguous tensor [..., out, in / per], and which are inside."""
    rows, columns = shape
    row, column, inside = _tile(shape, per)
    return (tl.program_id(2).to(tl.int64) * rows + row) * (columns // per) + column, inside


@triton.jit
def _store_sums(sums: tl.tensor, exact: tl.tensor, decoded: tl.tensor) -> None:
    """Sums of w^2 and (decoded - w)^2 of this tile, into sums [2, matrices, tiles]."""
    error = decoded - exact
    tiles = tl.num_programs(0) * tl.num_programs(1)
    place = tl.program_id(2) * tiles + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.store(sums + place, tl.sum(exact * exact))
    tl.store(sums + tl.num_programs(2) * tiles + place, tl.sum(error * error))


@triton.jit
def _quotient(size: tl.tensor, divisor: tl.tensor, is_moderate: tl.tensor) -> tl.tensor:
    """size / divisor, correctly rounded; size >= 0. `is_moderate`: the divisors lie between the two limits above.

    size * RN(1 / divisor) is off by less than 1.5 units in the last place. One correction brings it within one unit,
    and from there a second one gives the nearest number (P. Markstein, IBM J. Research and Development 34, 1990).
    """
    if is_moderate:
        reciprocal = tl.div_rn(1.0, divisor)
        quotient = size * reciprocal
        quotient = tl.fma(tl.fma(quotient, -divisor, size), reciprocal, quotient)
        quotient = tl.fma(tl.fma(quotient, -divisor, size), reciprocal, quotient)
    else:
        quotient = tl.div_rn(size, divisor)
    return quotient


@triton.jit
def _e4m3(size: tl.tensor) -> tl.tuple:
    """Codes 0..127 (int32) of the E4M3 values nearest to `size` >= 0, and those values (fp32)."""
    size = tl.minimum(size, E4M3_MAX)
    start = tl.maximum(size, SMALLEST_E4M3).to(tl.int32, bitcast=True) & EXPONENT  # the power of two below, or 2^-6
    start = start.to(tl.float32, bitcast=True)
    nearest = tl.fma(start, -EIGHTHS, tl.fma(start, EIGHTHS, size))
    # With E4M3's bias in place of fp32's, by the difference of the two, the bits are the code; so for subnormals.
    return (nearest * BIAS).to(tl.int32, bitcast=True) >> 20, nearest


@triton.jit
def _fp8_kernel(
    weight: tl.tensor,
    stored: tl.tuple,
    sums: tl.tensor,
    shape: tl.tuple,
    strides: tl.tuple,
    keep_rounded: tl.constexpr,
    by_row: tl.constexpr,
) -> None:
    """`stored`: codes [..., out, in] and scales, one per matrix or per row (`by_row`)."""
    codes, scales = stored
    place, inside = _in_weight(shape, strides)
    exact = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    if by_row:
        rows, _ = shape
        row, _, _ = _tile(shape, 1)
        scale = tl.load(scales + tl.program_id(2).to(tl.int64) * rows + row, mask=row < rows, other=1.0)
        least, most = tl.min(scale), tl.max(scale)
    else:
        scale = tl.load(scales + tl.program_id(2))
        least, most = scale, scale
    size = _quotient(tl.abs(exact), scale, (least >= SMALLEST_DIVISOR) & (most <= LARGEST_DIVISOR))
    sign = exact.to(tl.int32, bitcast=True) & SIGN
    code, nearest = _e4m3(size)
    decoded = (nearest.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) * scale
    stored_at, _ = _in_stored(shape, 1)
    code = (code | ((sign >> 24) & 0x80)).to(tl.uint8)
    tl.store(codes + stored_at, code.to(tl.float8e4nv, bitcast=True), mask=inside)
    if keep_rounded:
        tl.store(weight + place, decoded.to(weight.dtype.element_ty), mask=inside)
    _store_sums(sums, exact, decoded)


@triton.jit
def _e2m1(size: tl.tensor, signed: tl.tensor) -> tl.tuple:
    """Codes 0..15 (int32) of the E2M1 values nearest to `size` >= 0 with the sign of `signed`, and those values (fp32).

    Without comparisons: there are few registers for their results.
    """
    size = tl.minimum(size, E2M1_MAX)
    start = tl.maximum(size, 1.0).to(tl.int32, bitcast=True) & EXPONENT  # of the range: 1 (from 0), 2 or 4
    start = start.to(tl.float32, bitcast=True)
    nearest = tl.fma(start, -HALF_STEPS, tl.fma(start, HALF_STEPS, size))
    # By 2^-126 E2M1's only subnormal, 0.5, becomes fp32's largest power of two that is one; then the bits are the code.
    code = (nearest * SMALLEST_NORMAL).to(tl.int32, bitcast=True) >> 22
    sign = signed.to(tl.int32, bitcast=True) & SIGN
    nearest = (nearest.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return code | ((sign >> 28) & 8), nearest


@triton.jit
def _nvfp4_kernel(
    weight: tl.tensor,
    stored: tl.tuple,
    sums: tl.tensor,
    shape: tl.tuple,
    strides: tl.tuple,
    keep_rounded: tl.constexpr,
) -> None:
    """`stored`: packed codes [..., out, in / 2], block scales [..., out, in / 16], global scales [...]."""
    codes, scales, scales_2 = stored
    place, inside = _in_weight(shape, strides)
    exact = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    blocks = tl.reshape(exact, (TILE_ROWS, TILE_COLUMNS // BLOCK, BLOCK))
    scale_2 = tl.load(scales_2 + tl.program_id(2))
    amax = tl.max(tl.abs(blocks), 2)
    # With scales by at most 1, no quotient underflows to a zero, which has no sign.
    is_moderate = (scale_2 >= SMALLEST_DIVISOR / SMALLEST_SCALE) & (scale_2 <= 1 / E4M3_MAX)
    quotient = _quotient(amax, E2M1_MAX * scale_2, is_moderate)
    clamped = tl.minimum(tl.maximum(quotient, SMALLEST_SCALE), E4M3_MAX)
    scale_code, scale = _e4m3(tl.where(amax == 0, 1.0, clamped))
    step = (scale * scale_2)[:, :, None]
    size = _quotient(tl.abs(blocks), step, is_moderate)
    signed = blocks + 0.0  # -0.0 becomes 0.0
    if not is_moderate:
        signed = tl.where(size > 0, signed, 0.0)
    code, nearest = _e2m1(size, signed)
    even, odd = tl.split(tl.reshape(code, (TILE_ROWS, TILE_COLUMNS // 2, 2)))
    stored_at, stored_inside = _in_stored(shape, 2)
    tl.store(codes + stored_at, (even | (odd << 4)).to(tl.uint8), mask=stored_inside)
    stored_at, stored_inside = _in_stored(shape, BLOCK)
    tl.store(scales + stored_at, scale_code.to(tl.uint8).to(tl.float8e4nv, bitcast=True), mask=stored_inside)
    decoded = tl.reshape(nearest * step, (TILE_ROWS, TILE_COLUMNS))
    if keep_rounded:
        tl.store(weight + place, decoded.to(weight.dtype.element_ty), mask=inside)
    _store_sums(sums, exact, decoded)


def _launch(
    kernel: Any, weight: torch.Tensor, stored: tuple[torch.Tensor, ...], *switches: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `kernel` over all tiles of weight [..., out, in]; the sums of w^2 and (decoded - w)^2, fp64 [matrices]."""
    rows, columns = weight.shape[-2:]
    is_stacked = weight.dim() == 3
    matrices = weight.shape[0] if is_stacked else 1
    across, down = -(-columns // TILE_COLUMNS.value), -(-rows // TILE_ROWS.value)
    sums = torch.empty((2, matrices, across * down), dtype=torch.float32, device=weight.device)
    strides = (weight.stride(0) if is_stacked else 0, *weight.stride()[-2:])
    with torch.cuda.device(weight.device):
        kernel[(across, down, matrices)](weight, stored, sums, (rows, columns), strides, *switches, **OPTIONS)
    signal, noise = sums.sum(-1, dtype=torch.float64)
    return signal, noise


def _fp8(
    weight: torch.Tensor, amax: torch.Tensor, stored: Tensors, keep_rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = stored["weight_scale"].copy_(scale_of(amax))
    return _launch(_fp8_kernel, weight, (stored["weight"], scales), keep_rounded, amax.dim() == weight.dim() - 1)


def _nvfp4(
    weight: torch.Tensor, amax: torch.Tensor, stored: Tensors, keep_rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    scales_2 = stored["weight_scale_2"].copy_(global_scale(amax))
    return _launch(_nvfp4_kernel, weight, (stored["weight"], stored["weight_scale"], scales_2), keep_rounded)


KERNELS: dict[str, Fused] = {"fp8": _fp8, "fp8_per_channel": _fp8, "nvfp4": _nvfp4}


@cache
def run_on(device: torch.device) -> bool:
    """True where the kernels can be compiled for `device` and launched there; a small one is, the first time.

    Triton needs a C compiler and Python's headers besides, which a slim container lacks, and a directory to write to.
    """
    if torch.version.hip or torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return False
    stored = {
        "weight": torch.empty((16, 16), dtype=torch.float8_e4m3fn, device=device),
        "weight_scale": torch.empty((), device=device),
    }
    try:
        _fp8(torch.ones((16, 16), device=device), torch.ones((), device=device), stored, False)
    except (TritonError, RuntimeError, OSError, subprocess.CalledProcessError) as error:
        reason = str(error).strip().partition("\n")[0]
        what = f"Triton does not work here ({type(error).__name__}: {reason})"
        warnings.warn(f"{what}; weights are encoded by torch, to the same bytes and more slowly", stacklevel=2)
        return False
    return True
