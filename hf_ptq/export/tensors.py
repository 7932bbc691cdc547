"""From a quantized model to the tensors of its export, following the source's names.

Every tensor of the source is written under its own name. A linear that is quantized becomes the tensors of its
format, made from the weight in memory and stored as the output layout has them; everything else is the source's bytes,
copied from file to file. What will be written is planned before any weight exists (planned.py). Weights are encoded
part by part, so that temporaries stay small, or by a kernel, which has none; the error made is measured in the same
pass, and the rounded weight can be left in the model's place, so that a preview computes with exactly what is on disk.
Weight ranges never depend on calibration data.

Over several ranks each encodes and writes its share (share.py). Experts are encoded where they are. A dense weight that
is spread over the ranks is gathered with its unit, since its range is that of the whole fused group, and its rounded
rows go back to where they came from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import Source
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.export.layouts.fakequant import RANGE
from hf_ptq.export.layouts.layout import Layout
from hf_ptq.export.planned import (
    cache_layers,
    has_input_scale,
    joined,
    kv_names,
    range_shape,
    stored_dtype,
    tensor_names,
)
from hf_ptq.export.share import Share
from hf_ptq.model.sharding import full_of, local_of
from hf_ptq.model.units import Unit
from hf_ptq.model.wrappers import parameter_of
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.formats import codecs, encode, fused
from hf_ptq.quantization.formats.codec import Layout as StoredShapes
from hf_ptq.quantization.formats.codec import Tensors
from hf_ptq.quantization.formats.description import NumberFormat
from hf_ptq.quantization.formats.fp8 import scale_of
from hf_ptq.quantization.formats.ranges import Index, Ranges, parts
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.ranges import RangesOf, weight_ranges

PART_ELEMENTS = 1 << 24  # elements encoded at a time: 64 MiB of fp32 per temporary,
CPU_PART_ELEMENTS = 1 << 22  # and 16 MiB on a CPU, which has nothing to gain from more


@dataclass(frozen=True)
class WeightError:
    """The error of one module's weight: sums over its elements of w^2 and (decoded - w)^2."""

    module: str
    kind: str  # the projection's name
    format: str
    signal: float
    noise: float


@dataclass(frozen=True)
class Output:
    """Where tensors go: in which layout, which of them from this rank, by which writer; and what they come from."""

    layout: Layout
    share: Share
    writer: ShardWriter
    source: Source


# --- weights -----------------------------------------------------------------------------------


def copy_unit(unit: Unit, assignment: Assignment, output: Output, reader: SourceReader) -> None:
    """Queue this rank's share of what is not quantized in the unit: the source's bytes, from file to file."""
    for name in unquantized_of(unit, assignment):
        if output.share.writes(name):
            entry = reader.source.tensors[name]
            output.writer.copy(name, reader.path(entry), entry.offset)


def unquantized_of(unit: Unit, assignment: Assignment) -> list[str]:
    """The unit's tensors that are written as they are."""
    return [name for name in unit.tensors if name not in assignment.by_tensor]


@torch.no_grad()
def quantize_unit(
    unit: Unit,
    model: nn.Module,
    assignment: Assignment,
    output: Output,
    keep_rounded: bool,
    ranges_of: RangesOf = weight_ranges,
) -> list[WeightError]:
    """Encode the unit's quantized weights and queue this rank's share of their tensors for writing.

    `keep_rounded`: leave decode(encode(w)) in the model instead of w. `ranges_of`: the ranges of some weights, asked
    for the fused groups of which this rank needs something. Weights are finite (model/finite.py). Every rank calls it,
    for the same units in the same order.
    """
    weights = weights_of(unit, assignment)
    values = {q: q.view.of(_whole(parameter_of(model, q.view.parameter), q)) for q in weights}  # by all ranks at once
    groups = {q.group for q in weights if keep_rounded or written_modules(q, output)}
    ranges = ranges_of({q: tensor for q, tensor in values.items() if q.group in groups})
    ranges = {q: _of_all_experts(of_q) if q.view.joined else of_q for q, of_q in ranges.items()}
    errors: list[WeightError] = []
    for weight, range_ in ranges.items():
        errors += _quantize_weight(weight, values[weight], range_, output, keep_rounded)
        if keep_rounded and output.share.is_cut(weight.view):
            _round_rows(weight, values[weight], range_, parameter_of(model, weight.view.parameter), output.share)
    return errors


def _of_all_experts(ranges: Ranges) -> Ranges:
    """Experts that are written as one tensor have one range, where it is a number."""
    amax = ranges.amax
    return replace(ranges, amax=amax.amax().expand_as(amax)) if amax.dim() == 1 else ranges


def weights_of(unit: Unit, assignment: Assignment) -> list[QuantizedWeight]:
    """The unit's quantized weights."""
    inside = set(unit.tensors)
    return [q for q in assignment.quantized if q.view.tensors[0] in inside]


def written_modules(weight: QuantizedWeight, output: Output) -> tuple[str, ...]:
    """The modules of a weight view whose tensors this rank writes."""
    view, share = weight.view, output.share
    if view.is_apart:
        written = share.written_modules(view)
        return view.modules[written.start : written.stop]
    stored = output.layout.stored(weight.scheme).layout(view.shape, torch.bfloat16)
    first = next(iter(stored))  # all tensors of a module go the same way
    return view.modules if share.writes(tensor_names(view, view.modules, first)[0]) else ()


def _whole(parameter: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The experts that are here, or the whole of a weight that is written as one."""
    return local_of(parameter) if weight.view.is_apart else full_of(parameter)


def _quantize_weight(
    weight: QuantizedWeight,
    tensor: torch.Tensor,
    ranges: Ranges,
    output: Output,
    keep_rounded: bool,
) -> list[WeightError]:
    """Encode one weight, or the experts of a stack that are here, and write what is this rank's to write."""
    view, share, modules = weight.view, output.share, written_modules(weight, output)
    keep_rounded = keep_rounded and not share.is_cut(view)
    if not modules and not keep_rounded:
        return []
    part = slice(None)
    if view.is_apart:
        held, written = share.held_modules(view), share.written_modules(view)
        part = slice(written.start - held.start, written.stop - held.start)
        if not keep_rounded:
            whole_part = (part, slice(None))
            tensor, ranges, part = tensor[part], ranges.of_part(weight.weight, whole_part), slice(None)
    dtype = stored_dtype(view, output.source, tensor.dtype)
    rounded_to = dtype if output.layout.stored(weight.scheme).rounds_to_source else None
    encoded, signal, noise = _encode(weight.weight, tensor, ranges, keep_rounded, rounded_to)
    if not modules:
        return []
    amax = ranges.amax
    if not view.is_stacked:
        encoded, amax = {local: values[None] for local, values in encoded.items()}, amax[None]
    encoded = {local: values[part] for local, values in encoded.items()}
    shape = (len(modules), *view.shape)
    stored = output.layout.stored(weight.scheme).store(encoded, shape, dtype)
    if output.layout.keeps_ranges and range_shape(weight) is not None:
        stored[RANGE] = amax[part]
    for local, values in stored.items():
        output.writer.write_stack(tensor_names(view, modules, local), joined(values)[None] if view.joined else values)
    sums = torch.stack([signal, noise])[:, part].tolist()
    kind, name = view.leaf, weight.weight.name
    return [WeightError(m, kind, name, s, n) for m, s, n in zip(modules, *sums, strict=True)]


def _round_rows(
    weight: QuantizedWeight, tensor: torch.Tensor, ranges: Ranges, parameter: torch.Tensor, share: Share
) -> None:
    """Leave the rounded weight in the rows that are here; `tensor`, the gathered weight, is used up.

    Rows that a format treats together are rounded together, also where the cut goes through them.
    """
    rows, step = share.held[weight.view.parameter], 1 if weight.view.joined else weight.weight.row_step
    if rows:
        start = rows.start // step * step
        together: Index = (slice(start, -(-rows.stop // step) * step),)
        together = (*together, slice(None)) if weight.view.joined else together
        _encode(weight.weight, tensor[together], ranges.of_part(weight.weight, together), True)
        local = local_of(parameter)
        here = weight.view.of(local) if weight.view.joined else local  # whole experts, or rows of one matrix
        here.copy_(tensor[rows.start : rows.stop])


def _encode(
    number_format: NumberFormat,
    tensor: torch.Tensor,
    ranges: Ranges,
    keep_rounded: bool,
    rounded_to: torch.dtype | None = None,
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """(stored tensors, sum of w^2, sum of (decoded - w)^2); the sums are fp64, one per matrix.

    `rounded_to`: the dtype in which the decoded weight itself is stored.
    """
    layout = codecs()[number_format.name].layout(tuple(tensor.shape))
    stored = {local: torch.empty(size, dtype=dtype, device=tensor.device) for local, (dtype, size) in layout.items()}
    kernel = fused(number_format.name, tensor) if ranges.block_amax is None and rounded_to is None else None
    if kernel is not None:
        return stored, *kernel(tensor, ranges.amax, stored, keep_rounded)
    return stored, *_encode_by_parts(number_format, tensor, ranges, stored, keep_rounded, rounded_to)


def _encode_by_parts(
    number_format: NumberFormat,
    tensor: torch.Tensor,
    ranges: Ranges,
    stored: Tensors,
    keep_rounded: bool,
    rounded_to: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `codec.Fused` says, by the codec's own functions."""
    codec, device, shape = codecs()[number_format.name], tensor.device, tuple(tensor.shape)
    matrices = tensor.shape[0] if tensor.dim() == 3 else 1
    signal = torch.zeros(matrices, dtype=torch.float64, device=device)
    noise = torch.zeros_like(signal)
    elements = CPU_PART_ELEMENTS if device.type == "cpu" else PART_ELEMENTS
    for index in parts(shape, elements, number_format.row_step):
        part = tensor[index]
        tensors = encode(number_format, part, ranges.of_part(number_format, index))
        for local, values in tensors.items():
            stored[local][_stored_index(codec.layout, local, index, shape)] = values
        decoded = codec.decode(tensors)
        decoded = decoded if rounded_to is None else decoded.to(rounded_to).float()
        where = index[0] if tensor.dim() == 3 else slice(None)
        exact = part.float()
        signal[where] += exact.square().sum((-1, -2)).double()
        noise[where] += (decoded - exact).square_().sum((-1, -2)).double()
        if keep_rounded:
            part.copy_(decoded)
    return signal, noise


def _stored_index(
    layout: Callable[[tuple[int, ...]], StoredShapes], local: str, index: Index, shape: tuple[int, ...]
) -> Index:
    """Where the stored tensor `local` of weight[index] lies in that of the whole weight: after what the rows before
    it take, which are a multiple of the rows that the format treats together."""
    *leading, rows = index
    ends = [layout((row, shape[-1]))[local][1][:1] for row in rows.indices(shape[-2])[:2]]
    return (*leading, *(slice(*pair) for pair in zip(*ends, strict=True)))


# --- input scales --------------------------------------------------------------------------------


def write_input_scales(assignment: Assignment, quantizers: Mapping[str, Quantizer], output: Output) -> None:
    """Write this rank's share of what the layout stores of calibrated activations."""
    storages = {q: output.layout.stored(q.scheme).input for q in assignment.quantized if has_input_scale(q.input)}
    static = {q: stored for q, stored in storages.items() if stored is not None}
    if not static:
        return
    of_key = {q.input_key: (stored, quantizers[q.input_key]) for q, stored in static.items()}
    made = [stored.make(quantizer.codec, _range(quantizer)).flatten() for stored, quantizer in of_key.values()]
    host = dict(zip(of_key, torch.stack(made).cpu(), strict=True))
    for weight, stored in static.items():
        names = tensor_names(weight.view, weight.view.modules, stored.name)
        names = [name for name in names if output.share.writes(name)]
        output.writer.write_stack(names, host[weight.input_key].expand(len(names), 1).reshape(-1, *stored.shape))


def write_kv_scales(assignment: Assignment, quantizers: Mapping[str, Quantizer], output: Output) -> list[str]:
    """Write this rank's share of the scales of a calibrated KV cache, amax / 448 whatever its format; returns warnings.

    A layout that keeps ranges gets those. Latent attention has one range for keys and values, which are computed from
    the same cache.
    """
    layout, layers = output.layout, cache_layers(assignment)
    if not layers:
        return []
    quantizer_of = [(quantizers[f"{n}.k"], quantizers.get(f"{n}.v", quantizers[f"{n}.k"])) for n in layers]
    ranges = torch.stack([_range(q) for pair in quantizer_of for q in pair]).cpu().view(-1, 2)
    for layer, pair in zip(layers, ranges if layout.keeps_ranges else scale_of(ranges), strict=True):
        for name, value in zip(kv_names(layout, layer), pair, strict=True):
            if output.share.writes(name):
                output.writer.write(name, value.reshape(layout.kv_shape))
    dead = [layer for layer, pair in zip(layers, ranges.tolist(), strict=True) if 0 in pair]
    return [f"keys or values of {layer} were zero in every calibration token; their scale is 1.0" for layer in dead]


def _range(quantizer: Quantizer) -> torch.Tensor:
    assert quantizer.amax is not None, f"{quantizer.key} was not calibrated"
    return quantizer.amax.detach()
