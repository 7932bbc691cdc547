"""Ranges of weights: what a format's scales are made from, over the members of a fused group together.

They never depend on calibration data. This file knows neither modules nor ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from hf_ptq.quantization.assignment import QuantizedWeight
from hf_ptq.quantization.formats.ranges import Ranges, weight_amax

Weights = Mapping[QuantizedWeight, torch.Tensor]
RangesOf = Callable[[Weights], dict[QuantizedWeight, Ranges]]


def weight_ranges(weights: Weights) -> dict[QuantizedWeight, Ranges]:
    """The largest magnitudes, as each format wants them; where one serves a fused group, the group's largest."""
    ranges = {q: weight_amax(tensor, q.weight) for q, tensor in weights.items()}
    shared: dict[str, torch.Tensor] = {}
    for weight, amax in ranges.items():
        if weight.weight.is_shared:
            most = shared.get(weight.group, amax)
            shared[weight.group] = torch.maximum(most, amax.to(most.device))
    return {q: Ranges(shared[q.group].to(a.device) if q.weight.is_shared else a) for q, a in ranges.items()}
