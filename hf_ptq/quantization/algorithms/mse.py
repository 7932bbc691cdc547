"""The ranges of weights by search: of some candidates the one whose rounded weights are nearest to the weights.

    range = argmin over candidates c of sum (w - decode(encode(w; c)))^2

The sum is over what shares the range: a row, a block, or for formats with one range per tensor the whole fused group.
Candidates are multiples of the largest magnitude, or all E4M3 scales of NVFP4 blocks. The largest magnitude itself is
always the first candidate, and wins where others are no better, so that the error is never above that of max
calibration. One candidate at a time is held against the best so far, part of a weight by part, so that the search
needs a few times a part's memory whatever the number of candidates. Sums are fp64: the order in which ranks or
kernels add does not decide. Ranges of activations are those of max calibration.

Formats whose block scales are computed at run time from the block itself, and MX formats, have no range to choose;
with `fp8_scale_sweep` all but NVFP4 with chosen block scales stay as max calibration has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from hf_ptq.quantization.algorithm import AlgorithmSpec, Mse
from hf_ptq.quantization.algorithms.max import MAX
from hf_ptq.quantization.assignment import QuantizedWeight
from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.description import NumberFormat
from hf_ptq.quantization.formats.ranges import Ranges, block_amax, parts, sums_of_parts
from hf_ptq.quantization.ranges import Weights, weight_ranges

PART_ELEMENTS = 1 << 24  # searched at a time; on a CPU what stays in its caches
CPU_PART_ELEMENTS = 1 << 18


def _ranges_of(spec: AlgorithmSpec, weights: Weights) -> dict[QuantizedWeight, Ranges]:
    """The ranges of some weights, among them all members of a fused group or none."""
    assert isinstance(spec, Mse)
    ranges = weight_ranges(weights)
    groups: dict[str, list[QuantizedWeight]] = {}
    for weight, tensor in weights.items():
        number_format = weight.weight
        if _passes_over(spec, number_format):
            continue
        if number_format.has_chosen_blocks:
            ranges[weight] = _chosen_blocks(spec, number_format, tensor, ranges[weight])
        elif number_format.is_shared:
            groups.setdefault(weight.group, []).append(weight)
        else:
            ranges[weight] = _chosen_parts(spec, number_format, tensor, ranges[weight])
    for members in groups.values():
        chosen = _of_group(spec, {q: (weights[q], ranges[q]) for q in members})
        ranges |= {q: Ranges(chosen.to(ranges[q].amax.device)) for q in members}
    return ranges


def _passes_over(spec: AlgorithmSpec, number_format: NumberFormat) -> bool:
    """True where there is no range to choose: it is computed from the block itself, or the sweep is for others."""
    assert isinstance(spec, Mse)
    if number_format.is_dynamic or not spec.fp8_scale_sweep:
        return number_format.is_dynamic
    return not number_format.has_chosen_blocks or codecs()[number_format.name].scale_sweep is None


def _chosen_blocks(spec: Mse, number_format: NumberFormat, weight: torch.Tensor, ranges: Ranges) -> Ranges:
    """Formats with chosen block scales under a global one: the ranges of the blocks."""
    codec = codecs()[number_format.name]
    own = block_amax(weight, number_format.input_multiple)
    for index in _parts(weight, number_format):
        part, amax = weight[index], ranges.of_part(number_format, index).amax
        if spec.fp8_scale_sweep and codec.scale_sweep is not None:
            candidates = codec.scale_sweep(amax, own[index])
        else:
            candidates = _multiples(spec, own[index])

        def error(blocks: torch.Tensor, part: torch.Tensor = part, amax: torch.Tensor = amax) -> torch.Tensor:
            return sums_of_parts(_squares(codec.round_blocks(part, amax, blocks), part), number_format)

        own[index] = _best(own[index].clone(), candidates, error)
    return Ranges(ranges.amax, own)


def _chosen_parts(spec: Mse, number_format: NumberFormat, weight: torch.Tensor, ranges: Ranges) -> Ranges:
    """Formats with a range per row, block or tile and no other."""
    chosen = ranges.amax.clone()
    for index in _parts(weight, number_format):
        part, start = weight[index], Ranges(chosen).of_part(number_format, index).amax

        def error(amax: torch.Tensor, part: torch.Tensor = part) -> torch.Tensor:
            return sums_of_parts(_squares(_rounded(number_format, part, amax), part), number_format)

        start.copy_(_best(start.clone(), _multiples(spec, start.clone()), error))  # a view of `chosen`
    return Ranges(chosen)


def _of_group(spec: Mse, members: dict[QuantizedWeight, tuple[torch.Tensor, Ranges]]) -> torch.Tensor:
    """Formats with one range per tensor: that of the group, one for each of stacked matrices."""
    first = next(iter(members.values()))[1].amax
    candidates = torch.stack([first, *_multiples(spec, first)])
    errors = torch.zeros(candidates.shape, dtype=torch.float64, device=first.device)
    for weight, (tensor, _) in members.items():
        for index in _parts(tensor, weight.weight):
            part = tensor[index]
            for i, amax in enumerate(candidates.to(tensor.device)):
                rounded = _rounded(weight.weight, part, amax[index[:-1]])
                errors[i][index[:-1]] += _squares(rounded, part).sum((-1, -2), dtype=torch.float64).to(first.device)
    best, least = first, errors[0]
    for candidate, found in zip(candidates[1:], errors[1:], strict=True):
        better = found < least
        best, least = torch.where(better, candidate, best), torch.where(better, found, least)
    return best


def _best(
    best: torch.Tensor,
    candidates: Iterable[torch.Tensor],
    error: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Of `best` and the candidates, all of one shape, element by element the first of the least error."""
    least = error(best)
    for candidate in candidates:
        found = error(candidate)
        better = found < least
        best, least = torch.where(better, candidate, best), torch.where(better, found, least)
    return best


def _multiples(spec: Mse, amax: torch.Tensor) -> Iterator[torch.Tensor]:
    return (amax * multiplier for multiplier in spec.multipliers)


def _rounded(number_format: NumberFormat, weight: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    codec = codecs()[number_format.name]
    if codec.encode_blocks is None:
        return codec.decode(codec.encode(weight, amax))
    return codec.round_blocks(weight, amax, block_amax(weight, number_format.input_multiple))


def _squares(rounded: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rounded.sub_(weight).square_()


def _parts(weight: torch.Tensor, number_format: NumberFormat) -> Iterator[tuple[slice, ...]]:
    elements = CPU_PART_ELEMENTS if weight.device.type == "cpu" else PART_ELEMENTS
    return parts(tuple(weight.shape), elements, number_format.row_step)


MSE = replace(MAX, weight_ranges=_ranges_of, passes_over=_passes_over)
