"""A calibration's two ends, around whatever runs the data: observers on, and ranges from what they have seen."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hf_ptq.quantization.algorithm import AlgorithmSpec
from hf_ptq.quantization.algorithms import ALGORITHMS
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.statistics import Statistics


def begin(algorithm: AlgorithmSpec, quantizers: Mapping[str, Quantizer], device: torch.device) -> Statistics:
    """Empty statistics on `device`, which the quantizers fill from now on; commit them after each batch."""
    chosen = ALGORITHMS[algorithm.method]
    statistics = Statistics(chosen.statistics(quantizers), device)
    chosen.start(quantizers, statistics)
    return statistics


def calls(algorithm: AlgorithmSpec, quantizers: Mapping[str, Quantizer], statistics: Statistics) -> dict[str, float]:
    """Key -> how often the finished batches of this rank have called the quantizer, of those that need data."""
    return ALGORITHMS[algorithm.method].calls(quantizers, statistics)


def end(algorithm: AlgorithmSpec, quantizers: Mapping[str, Quantizer], statistics: Statistics) -> list[str]:
    """Ranges from statistics that are reduced over the ranks; returns warnings. Raises RunError as algorithms do."""
    return ALGORITHMS[algorithm.method].finish(quantizers, statistics)
