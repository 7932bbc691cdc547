"""Calibration algorithms: `ALGORITHMS[name]` of a recipe's `algorithm`.

An algorithm says which statistics of the activations it needs and turns their totals into ranges. It does not know
batches, ranks or files.
"""

from __future__ import annotations

from hf_ptq.quantization.algorithms.algorithm import Algorithm
from hf_ptq.quantization.algorithms.max import MAX

ALGORITHMS: dict[str, Algorithm] = {"max": MAX}
