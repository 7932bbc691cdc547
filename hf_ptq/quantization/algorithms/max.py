"""Max calibration: the range of an activation is the largest magnitude seen, that of a weight its largest.

    amax = max over all tokens of |x|

Formats that scale at run time, or with a constant, need nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hf_ptq.errors import Problem, RunError
from hf_ptq.quantization.affine import AffineQuantizer
from hf_ptq.quantization.algorithms.algorithm import Algorithm
from hf_ptq.quantization.coverage import never_called
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.ranges import weight_ranges
from hf_ptq.quantization.statistics import Group, Statistics, StatisticSpec


def _calibrated(quantizers: Mapping[str, Quantizer]) -> dict[str, Quantizer]:
    return {key: quantizer for key, quantizer in quantizers.items() if quantizer.format.needs_data}


def _seen_key(key: str) -> str:
    return f"{key} tensors seen"


def _sum_key(key: str) -> str:
    return f"{key} sum"


def _statistics(quantizers: Mapping[str, Quantizer]) -> list[StatisticSpec]:
    specs = []
    for key, quantizer in _calibrated(quantizers).items():
        if isinstance(quantizer, AffineQuantizer):
            specs += [
                StatisticSpec(key, 2 * quantizer.channels, "highest"),
                StatisticSpec(_sum_key(key), quantizer.channels + 1, "sum"),
                StatisticSpec(_seen_key(key), 1, "sum"),
            ]
            continue
        group: Group = "data" if quantizer.num_experts is None else "expert"
        counts = quantizer.num_experts or 1
        specs += [
            StatisticSpec(key, quantizer.size, "max", group),
            StatisticSpec(_seen_key(key), counts, "sum", group),
        ]
    return specs


def _start(quantizers: Mapping[str, Quantizer], statistics: Statistics) -> None:
    for key, quantizer in _calibrated(quantizers).items():
        quantizer.start_observing(statistics.pending(key), statistics.pending(_seen_key(key)))
        if isinstance(quantizer, AffineQuantizer):
            quantizer.start_summing(statistics.pending(_sum_key(key)))


def _calls(quantizers: Mapping[str, Quantizer], statistics: Statistics) -> dict[str, float]:
    """Tensors (rows, for experts) that each calibrated quantizer has seen in finished batches."""
    keys = list(_calibrated(quantizers))
    seen = [statistics.total(_seen_key(key)).sum() for key in keys]
    return dict(zip(keys, torch.stack(seen).tolist() if seen else [], strict=True))


def _finish(quantizers: Mapping[str, Quantizer], statistics: Statistics) -> list[str]:
    """Ranges from totals; returns warnings (inputs that were all zero).

    Raises RunError naming activations with NaN or infinity, and modules that were never called.
    """
    calibrated = _calibrated(quantizers)
    for key, quantizer in calibrated.items():
        if isinstance(quantizer, AffineQuantizer):
            quantizer.stop_summing(statistics.total(_sum_key(key)))
        quantizer.stop_observing(statistics.total(key), statistics.total(_seen_key(key)))
    if not calibrated:
        return []
    ranges = torch.stack([statistics.total(key).amax() for key in calibrated]).tolist()
    calls = _calls(quantizers, statistics)
    problems = never_called(calls, quantizers)
    warnings: list[str] = []
    for key, amax in zip(calibrated, ranges, strict=True):
        if calls[key] == 0:
            continue
        if not math.isfinite(amax):
            problems.append(
                Problem(
                    f"the input of {key} held NaN or infinity during calibration",
                    "run the model unquantized on this data, or leave this module out of the recipe",
                )
            )
        elif amax == 0:
            warnings.append(f"the input of {key} was zero in every calibration token; its scale is 1.0")
    if problems:
        raise RunError(*problems)
    return warnings


MAX = Algorithm(_statistics, _start, _calls, _finish, lambda _, weights: weight_ranges(weights), plan_safe=True)
