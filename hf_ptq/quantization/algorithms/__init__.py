"""Calibration algorithms: `ALGORITHMS[method]` of a recipe's `algorithm`.

An algorithm says which statistics of the activations it needs and turns their totals into ranges; and it chooses the
ranges of weights. It does not know batches, ranks or files.
"""

from __future__ import annotations

from hf_ptq.quantization.algorithms.algorithm import Algorithm
from hf_ptq.quantization.algorithms.max import MAX
from hf_ptq.quantization.algorithms.mse import MSE

ALGORITHMS: dict[str, Algorithm] = {"max": MAX, "mse": MSE}
