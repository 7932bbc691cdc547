"""From a quantized model to the tensors of its export, following the source's names.

Every tensor of the source is written under its own name. A linear that is quantized becomes the tensors of its
format, made from the weight in memory and stored as the output layout has them; everything else is the source's bytes,
copied from file to file. What will be written is planned before any weight exists (planned.py). Weights are encoded
part by part, so that temporaries stay small; the error made is measured in the same pass, and the rounded weight can
be left in the model's place, so that a preview computes with exactly what is on disk. Weight ranges never depend on
calibration data.

Over several ranks each encodes and writes its share (share.py). Experts are encoded where they are. A dense weight that
is spread over the ranks is gathered with its unit, since its range is that of the whole fused group, and its rounded
rows go back to where they came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.export.layouts.fakequant import RANGE
from hf_ptq.export.layouts.layout import Layout
from hf_ptq.export.planned import cache_layers, has_input_scale, kv_names, stored_dtype, tensor_name
from hf_ptq.export.share import Share
from hf_ptq.model.sharding import full_of, local_of
from hf_ptq.model.units import Unit
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.codec import Codec, Tensors
from hf_ptq.quantization.formats.description import NumberFormat
from hf_ptq.quantization.formats.fp8 import scale_of
from hf_ptq.quantization.quantizer import Quantizer

PART_ELEMENTS = 1 << 24  # elements encoded at a time: 64 MiB of fp32 per temporary,
CPU_PART_ELEMENTS = 1 << 22  # and 16 MiB on a CPU, which has nothing to gain from more
Index = tuple[slice, ...]


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
    """Where tensors go: in which layout, which of them from this rank, by which writer."""

    layout: Layout
    share: Share
    writer: ShardWriter


# --- weights -----------------------------------------------------------------------------------


@torch.no_grad()
def quantize_unit(
    unit: Unit,
    model: nn.Module,
    assignment: Assignment,
    output: Output,
    reader: SourceReader,
    keep_rounded: bool,
) -> list[WeightError]:
    """Encode the unit's quantized weights and queue this rank's share of all tensors but the input scales for writing.

    `keep_rounded`: leave decode(encode(w)) in the model instead of w. Weights are finite (model/finite.py). Every rank
    calls it, for the same units in the same order.
    """
    weights = weights_of(unit, assignment)
    share = output.share
    for name in unit.tensors:
        if name not in assignment.by_tensor and share.writes(name):
            entry = reader.source.tensors[name]
            output.writer.copy(name, reader.path(entry), entry.offset)
    values = {q: q.view.of(_whole(model.get_parameter(q.view.parameter), q)) for q in weights}
    ranges = _weight_ranges(values)
    errors: list[WeightError] = []
    for weight, tensor in values.items():
        dtype = stored_dtype(weight.view, reader.source, tensor.dtype)
        errors += _quantize_weight(weight, tensor, ranges[weight], output, dtype, keep_rounded)
        if keep_rounded and share.is_cut(weight.view):
            _round_rows(weight, model.get_parameter(weight.view.parameter), ranges[weight], share)
    return errors


def weights_of(unit: Unit, assignment: Assignment) -> list[QuantizedWeight]:
    """The unit's quantized weights."""
    inside = set(unit.tensors)
    return [q for q in assignment.quantized if q.view.tensors[0] in inside]


def written_modules(weight: QuantizedWeight, layout: Layout, share: Share) -> tuple[str, ...]:
    """The modules of a weight view whose tensors this rank writes."""
    view = weight.view
    if view.is_stacked:
        written = share.written_modules(view)
        return view.modules[written.start : written.stop]
    stored = layout.stored(weight.scheme).layout(view.shape, torch.bfloat16)
    first = next(iter(stored))  # all tensors of a module go the same way
    return view.modules if share.writes(tensor_name(view.modules[0], first)) else ()


def _whole(parameter: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The experts that are here, or the whole of a dense weight."""
    return local_of(parameter) if weight.view.is_stacked else full_of(parameter)


def _quantize_weight(
    weight: QuantizedWeight,
    tensor: torch.Tensor,
    amax: torch.Tensor,
    output: Output,
    dtype: torch.dtype,
    keep_rounded: bool,
) -> list[WeightError]:
    """Encode one weight, or the experts of a stack that are here, and write what is this rank's to write.

    `dtype`: the source's of this weight.
    """
    share, view = output.share, weight.view
    modules = written_modules(weight, output.layout, share)
    keep_rounded = keep_rounded and not share.is_cut(view)
    if not modules and not keep_rounded:
        return []
    part = slice(None)
    if view.is_stacked:
        held, written = share.held_modules(view), share.written_modules(view)
        part = slice(written.start - held.start, written.stop - held.start)
        if not keep_rounded:
            tensor, amax, part = tensor[part], amax[part], slice(None)
    rounded_to = dtype if output.layout.stored(weight.scheme).rounds_to_source else None
    encoded, signal, noise = _encode(codecs()[weight.weight.name], tensor, amax, keep_rounded, rounded_to)
    if not modules:
        return []
    if not view.is_stacked:
        encoded, amax = {local: values[None] for local, values in encoded.items()}, amax[None]
    _write(weight, modules, {local: values[part] for local, values in encoded.items()}, output, dtype)
    if output.layout.keeps_ranges:
        output.writer.write_stack([tensor_name(module, RANGE) for module in modules], amax[part].float())
    sums = torch.stack([signal, noise])[:, part].tolist()
    kind, name = view.leaf, weight.weight.name
    return [WeightError(m, kind, name, s, n) for m, s, n in zip(modules, *sums, strict=True)]


def _write(
    weight: QuantizedWeight, modules: tuple[str, ...], encoded: Tensors, output: Output, dtype: torch.dtype
) -> None:
    """Queue what the layout stores of the codec's tensors [modules, ...] for writing."""
    shape = (len(modules), *weight.view.shape)
    for local, values in output.layout.stored(weight.scheme).store(encoded, shape, dtype).items():
        output.writer.write_stack([tensor_name(module, local) for module in modules], values)


def _round_rows(weight: QuantizedWeight, parameter: torch.Tensor, amax: torch.Tensor, share: Share) -> None:
    """Leave the rounded weight in the rows that are here: below the range, a format's scales are of parts of a row."""
    rows = share.held[weight.view.parameter]
    if rows:
        _encode(
            codecs()[weight.weight.name],
            local_of(parameter),
            amax[rows.start : rows.stop] if amax.dim() else amax,
            True,
        )


def _weight_ranges(parameters: Mapping[QuantizedWeight, torch.Tensor]) -> dict[QuantizedWeight, torch.Tensor]:
    """amax of each weight as its format wants it; formats with one scale per tensor take the fused group's maximum."""
    ranges = {q: _amax(tensor, q.weight) for q, tensor in parameters.items()}
    shared: dict[str, torch.Tensor] = {}
    for weight, amax in ranges.items():
        if weight.weight.is_shared:
            most = shared.get(weight.group, amax)
            shared[weight.group] = torch.maximum(most, amax.to(most.device))
    return {q: shared[q.group].to(amax.device) if q.weight.is_shared else amax for q, amax in ranges.items()}


def _amax(tensor: torch.Tensor, number_format: NumberFormat) -> torch.Tensor:
    """max |w| over each matrix, fp32 [...], or over each row, fp32 [..., out]."""
    rows_low, rows_high = tensor.aminmax(dim=-1)
    rows = torch.maximum(rows_high, -rows_low).float()
    return rows.amax(-1) if number_format.is_shared else rows


def _encode(
    codec: Codec,
    tensor: torch.Tensor,
    amax: torch.Tensor,
    keep_rounded: bool,
    rounded_to: torch.dtype | None = None,
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """(stored tensors, sum of w^2, sum of (decoded - w)^2); the sums are fp64, one per matrix.

    `rounded_to`: the dtype in which the decoded weight itself is stored.
    """
    device = tensor.device
    layout = codec.layout(tuple(tensor.shape))
    encoded = {local: torch.empty(shape, dtype=dtype, device=device) for local, (dtype, shape) in layout.items()}
    matrices = tensor.shape[0] if tensor.dim() == 3 else 1
    signal = torch.zeros(matrices, dtype=torch.float64, device=device)
    noise = torch.zeros_like(signal)
    for index in _parts(tuple(tensor.shape), CPU_PART_ELEMENTS if device.type == "cpu" else PART_ELEMENTS):
        part = tensor[index]
        tensors = codec.encode(part, amax[index[: amax.dim()]])
        for local, values in tensors.items():
            whole = encoded[local]
            whole[index[: whole.dim()]] = values
        decoded = codec.decode(tensors)
        decoded = decoded if rounded_to is None else decoded.to(rounded_to).float()
        where = index[0] if tensor.dim() == 3 else slice(None)
        exact = part.float()
        signal[where] += exact.square().sum((-1, -2)).double()
        noise[where] += (decoded - exact).square_().sum((-1, -2)).double()
        if keep_rounded:
            part.copy_(decoded)
    return encoded, signal, noise


def _parts(shape: tuple[int, ...], elements: int) -> Iterator[Index]:
    """Indices that cut [out, in] into blocks of rows and [experts, out, in] into blocks of experts or of rows."""
    matrix = shape[-2] * shape[-1]
    if len(shape) == 3 and matrix <= elements:
        step = max(1, elements // max(1, matrix))
        yield from ((slice(start, start + step), slice(None)) for start in range(0, shape[0], step))
        return
    step = max(1, elements // max(1, shape[-1]))
    rows = [slice(start, start + step) for start in range(0, shape[-2], step)]
    if len(shape) == 2:
        yield from ((r,) for r in rows)
    else:
        yield from ((slice(e, e + 1), r) for e in range(shape[0]) for r in rows)


# --- input scales --------------------------------------------------------------------------------


def write_input_scales(assignment: Assignment, quantizers: Mapping[str, Quantizer], output: Output) -> None:
    """Write this rank's share of what the layout stores of calibrated activations."""
    storages = {q: output.layout.stored(q.scheme).input for q in assignment.quantized if has_input_scale(q.input)}
    static = {q: stored for q, stored in storages.items() if stored is not None}
    if not static:
        return
    made = {
        q.input_key: stored.make(quantizers[q.input_key].codec, _range(quantizers[q.input_key]))
        for q, stored in static.items()
    }
    host = dict(zip(made, torch.stack([value.flatten() for value in made.values()]).cpu(), strict=True))
    for weight, stored in static.items():
        names = [tensor_name(module, stored.name) for module in weight.view.modules]
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
    return quantizer.amax
