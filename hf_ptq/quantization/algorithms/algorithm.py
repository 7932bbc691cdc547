"""What a calibration algorithm consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hf_ptq.quantization.algorithm import AlgorithmSpec
from hf_ptq.quantization.assignment import QuantizedWeight
from hf_ptq.quantization.formats.description import NumberFormat
from hf_ptq.quantization.formats.ranges import Ranges
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.ranges import Weights
from hf_ptq.quantization.statistics import Statistics, StatisticSpec


@dataclass(frozen=True)
class Algorithm:
    """`statistics`: what the quantizers need; `start`: observers on; `finish`: totals -> ranges, observers off.
    `calls`: how often each quantizer that needs data was called, in batches that are committed.

    `finish` returns warnings and raises RunError where a range cannot be had. `weight_ranges`: the ranges of some
    weights, among them all members of a fused group or none, by the settings of the recipe. `plan_safe`: what it needs
    can be had from ranks that see a part of the data and hold a part of the model, and a test has shown it.
    `passes_over`: weights of this format have no range that the settings let it choose; they are as by max.
    """

    statistics: Callable[[Mapping[str, Quantizer]], list[StatisticSpec]]
    start: Callable[[Mapping[str, Quantizer], Statistics], None]
    calls: Callable[[Mapping[str, Quantizer], Statistics], dict[str, float]]
    finish: Callable[[Mapping[str, Quantizer], Statistics], list[str]]
    weight_ranges: Callable[[AlgorithmSpec, Weights], dict[QuantizedWeight, Ranges]]
    plan_safe: bool = False
    passes_over: Callable[[AlgorithmSpec, NumberFormat], bool] = lambda _spec, _format: False
