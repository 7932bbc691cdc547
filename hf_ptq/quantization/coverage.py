"""Which experts the calibration data reached: rows per expert and layer.

Every expert's weights are quantized, reached or not; what an expert that no token reached lacks is a range for its
inputs. It takes the layer's largest, as every server does with all experts of a layer. That is no fault, but too
little data or a bad mix is worth knowing: experts without a token, or far below the mean, are named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hf_ptq.quantization.quantizer import Quantizer

RARE_SHARE = 0.05  # of the layer's mean rows per expert


@dataclass(frozen=True)
class LayerCoverage:
    """The input of one product of a layer's experts: rows and amax of each expert."""

    name: str
    rows: tuple[int, ...]
    amax: tuple[float, ...]

    @property
    def starved(self) -> list[int]:
        """Experts that saw no token."""
        return [expert for expert, count in enumerate(self.rows) if count == 0]

    @property
    def rare(self) -> list[int]:
        """Experts that saw some tokens, but fewer than 5 % of the mean."""
        mean = sum(self.rows) / len(self.rows)
        return [expert for expert, count in enumerate(self.rows) if 0 < count < RARE_SHARE * mean]


def expert_coverage(quantizers: Mapping[str, Quantizer]) -> list[LayerCoverage]:
    """The coverage of every calibrated experts input, in the order of the layers; one transfer from the device."""
    calibrated = {key: (q.expert_rows, q.expert_amax) for key, q in quantizers.items()}
    known = {key: (rows, amax) for key, (rows, amax) in calibrated.items() if rows is not None and amax is not None}
    if not known:
        return []
    flat = torch.cat([tensor for pair in known.values() for tensor in pair]).tolist()
    coverage, start = [], 0
    for key, (rows, _) in known.items():
        count = len(rows)
        numbers, ranges = flat[start : start + count], flat[start + count : start + 2 * count]
        coverage.append(LayerCoverage(key, tuple(int(n) for n in numbers), tuple(ranges)))
        start += 2 * count
    return coverage


def by_layer(coverage: Iterable[LayerCoverage]) -> dict[str, LayerCoverage]:
    """Experts of a layer -> the coverage of their first product; the second sees the same tokens."""
    layers: dict[str, LayerCoverage] = {}
    for product in coverage:
        layers.setdefault(product.name.rpartition(".")[0], product)
    return layers


def starved_warning(coverage: Sequence[LayerCoverage], shown: int = 4) -> str | None:
    """One sentence that names the experts without a token; None where every expert saw one."""
    starved = {layer: product.starved for layer, product in by_layer(coverage).items() if product.starved}
    if not starved:
        return None
    total = sum(len(experts) for experts in starved.values())
    named = "; ".join(f"{layer}: {', '.join(map(str, experts))}" for layer, experts in list(starved.items())[:shown])
    more = f"; and {len(starved) - shown} more layers, in the report" if len(starved) > shown else ""
    return (
        f"{total} experts of {len(starved)} layers saw no calibration token and take their layer's largest input "
        f"scale: {named}{more}"
    )
