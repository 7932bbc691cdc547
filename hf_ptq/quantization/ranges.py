"""Ranges of weights: what a format's scales are made from, over the members of a fused group together.

They never depend on calibration data. This file knows neither modules nor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hf_ptq.quantization.assignment import QuantizedWeight
from hf_ptq.quantization.formats.description import NumberFormat

Ranges = dict[QuantizedWeight, torch.Tensor]
RangesOf = Callable[[Mapping[QuantizedWeight, torch.Tensor]], Ranges]


def weight_ranges(parameters: Mapping[QuantizedWeight, torch.Tensor]) -> Ranges:
    """amax of each weight as its format wants it; formats with one scale per tensor take the fused group's maximum."""
    ranges = {q: matrix_amax(tensor, q.weight) for q, tensor in parameters.items()}
    shared: dict[str, torch.Tensor] = {}
    for weight, amax in ranges.items():
        if weight.weight.is_shared:
            most = shared.get(weight.group, amax)
            shared[weight.group] = torch.maximum(most, amax.to(most.device))
    return {q: shared[q.group].to(amax.device) if q.weight.is_shared else amax for q, amax in ranges.items()}


def matrix_amax(tensor: torch.Tensor, number_format: NumberFormat) -> torch.Tensor:
    """max |w| over each matrix [..., out, in], fp32 [...], or over each row, fp32 [..., out]."""
    rows_low, rows_high = tensor.aminmax(dim=-1)
    rows = torch.maximum(rows_high, -rows_low).float()
    return rows.amax(-1) if number_format.is_shared else rows
