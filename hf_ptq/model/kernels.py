"""A Triton kernel that puts the outputs of experts back in order, weighs them and sums them, in one pass over memory.

`experts.weighted_sum` does that in torch with five passes; this gives the same bits. So products are rounded to the
dtype that torch gives them, nothing is contracted to a fused multiply-add, and a token's k products are added in the
order of torch's reduction on a GPU: into four sums by turns, and then these one after the other.

Nothing here decides whether the kernel is used.
"""
# Triton comes with CUDA builds of torch only, and its language is not quite Python's.
# pyright: reportMissingImports=false, reportGeneralTypeIssues=false, reportReturnType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

MOST_COLUMNS = 2048
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "enable_reflect_ftz": False}


@triton.jit
def _product(outputs: tl.tensor, chosen: tl.tuple, choice: tl.tensor, span: tl.tuple, rounding: tl.tensor) -> tl.tensor:
    """One choice's output times its weight, rounded to the dtype of `rounding`, fp32 [columns]."""
    places, weights = chosen
    column, hidden = span
    row = tl.load(places + choice) * hidden
    value = tl.load(outputs + row + column, mask=column < hidden, other=0.0).to(tl.float32)
    return (value * tl.load(weights + choice).to(tl.float32)).to(rounding.dtype.element_ty).to(tl.float32)


@triton.jit
def _weighted_sum_kernel(
    outputs: tl.tensor,
    chosen: tl.tuple,
    rounding: tl.tensor,
    total: tl.tensor,
    hidden: tl.tensor,
    k: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """`columns` of one token's row of `total` [tokens, hidden]; `chosen`: places and weights, [tokens, k] each."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    span = (column, hidden)
    sum_0 = tl.zeros((columns,), tl.float32)
    sum_1 = tl.zeros((columns,), tl.float32)
    sum_2 = tl.zeros((columns,), tl.float32)
    sum_3 = tl.zeros((columns,), tl.float32)
    for choice in tl.static_range(k):
        product = _product(outputs, chosen, token * k + choice, span, rounding)
        if choice % 4 == 0:
            sum_0 += product
        elif choice % 4 == 1:
            sum_1 += product
        elif choice % 4 == 2:
            sum_2 += product
        else:
            sum_3 += product
    result = ((sum_0 + sum_1) + sum_2) + sum_3
    result = result.to(rounding.dtype.element_ty).to(total.dtype.element_ty)
    tl.store(total + token * hidden + column, result, mask=column < hidden)


def weighted_sum(
    outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[tokens, hidden] of `dtype`: of each token, k rows of outputs [rows, hidden], by its weights [tokens, k].

    `places`: those rows, int64 [tokens * k]. All contiguous.
    """
    (tokens, k), hidden = weights.shape, outputs.shape[1]
    total = torch.empty((tokens, hidden), dtype=dtype, device=outputs.device)
    rounding = torch.empty(0, dtype=torch.promote_types(outputs.dtype, weights.dtype), device=outputs.device)
    columns = min(MOST_COLUMNS, triton.next_power_of_2(hidden))
    kernel: Any = _weighted_sum_kernel
    with torch.cuda.device(outputs.device):
        kernel[(tokens, triton.cdiv(hidden, columns))](
            outputs, (places, weights), rounding, total, hidden, k, columns, **OPTIONS
        )
    return total
