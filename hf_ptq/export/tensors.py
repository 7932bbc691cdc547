"""From a quantized model to the tensors of its export, following the source's names.

Every tensor of the source is written under its own name. A linear that is quantized becomes the tensors of its
format, made from the weight in memory; everything else is the source's bytes, copied from file to file. What will be
written is planned before any weight exists (`plan_tensors`). Weights are encoded part by part, so that temporaries
stay small; the error made is measured in the same pass, and the rounded weight can be left in the model's place, so
that a preview computes with exactly what is on disk. Weight ranges never depend on calibration data.

Over several ranks each encodes and writes its share (share.py). Experts are encoded where they are. A dense weight that
is spread over the ranks is gathered with its unit, since its range is that of the whole fused group, and its rounded
rows go back to where they came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hf_ptq.checkpoint.dtypes import SAFETENSORS_DTYPES
from hf_ptq.checkpoint.shards import TensorPlan
from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import Source
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.export.share import Share
from hf_ptq.model.sharding import full_of, local_of
from hf_ptq.model.units import Unit
from hf_ptq.model.views import WEIGHT
from hf_ptq.model.wrappers import parameter_of
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.codec import Codec, Tensors
from hf_ptq.quantization.formats.description import NumberFormat
from hf_ptq.quantization.formats.fp8 import scale_of
from hf_ptq.quantization.quantizer import Quantizer
from hf_ptq.quantization.ranges import RangesOf, weight_ranges

PART_ELEMENTS = 1 << 24  # elements encoded at a time: 64 MiB of fp32 per temporary,
CPU_PART_ELEMENTS = 1 << 22  # and 16 MiB on a CPU, which has nothing to gain from more
INPUT_SCALE = "input_scale"
Index = tuple[slice, ...]


@dataclass(frozen=True)
class WeightError:
    """The error of one module's weight: sums over its elements of w^2 and (decoded - w)^2."""

    module: str
    kind: str  # the projection's name
    format: str
    signal: float
    noise: float


# --- the plan ----------------------------------------------------------------------------------


def plan_tensors(units: Sequence[Unit], source: Source, assignment: Assignment) -> list[TensorPlan]:
    """What the export holds, in the order of the units; exact before any weight is loaded.

    Scales of the KV cache come last.
    """
    quantized = assignment.by_module
    planned: list[TensorPlan] = []
    for unit in units:
        for name in unit.tensors:
            weight = quantized.get(name.removesuffix(WEIGHT)) if name.endswith(WEIGHT) else None
            if weight is None:
                entry = source.tensors[name]
                planned.append(TensorPlan(name, entry.dtype, entry.shape))
            elif name.removesuffix(WEIGHT) == weight.view.modules[0]:
                planned += _planned_weight(weight)
    return planned + [TensorPlan(name, "F32", ()) for layer in _cache_layers(assignment) for name in _kv_names(layer)]


def _cache_layers(assignment: Assignment) -> list[str]:
    """The source's names of the attention modules whose cache has scales to store."""
    cache = assignment.kv
    return list(cache.layers.values()) if cache is not None and cache.needs_data else []


def _kv_names(layer: str) -> tuple[str, str]:
    """Where every server finds the scales of a layer's keys and values."""
    return f"{layer}.k_proj.k_scale", f"{layer}.v_proj.v_scale"


def _planned_weight(weight: QuantizedWeight) -> Iterator[TensorPlan]:
    """The tensors of a view; those of all experts by kind, so that a stack lies in the file as it does in memory."""
    modules = weight.view.modules
    layout = codecs()[weight.weight.name].layout(weight.view.shape)
    for local, (dtype, shape) in layout.items():
        yield from (TensorPlan(f"{module}.{local}", SAFETENSORS_DTYPES[dtype], shape) for module in modules)
    if has_input_scale(weight.input):
        yield from (TensorPlan(f"{module}.{INPUT_SCALE}", "F32", ()) for module in modules)


def has_input_scale(number_format: NumberFormat | None) -> bool:
    """True where a static activation scale is stored."""
    return number_format is not None and number_format.needs_data


# --- weights -----------------------------------------------------------------------------------


def copy_unit(unit: Unit, assignment: Assignment, share: Share, writer: ShardWriter, reader: SourceReader) -> None:
    """Queue this rank's share of what is not quantized in the unit: the source's bytes, from file to file."""
    for name in unquantized_of(unit, assignment):
        if share.writes(name):
            entry = reader.source.tensors[name]
            writer.copy(name, reader.path(entry), entry.offset)


def unquantized_of(unit: Unit, assignment: Assignment) -> list[str]:
    """The unit's tensors that are written as they are."""
    quantized = {module + WEIGHT for q in weights_of(unit, assignment) for module in q.view.modules}
    return [name for name in unit.tensors if name not in quantized]


@torch.no_grad()
def quantize_unit(
    unit: Unit,
    model: nn.Module,
    assignment: Assignment,
    share: Share,
    writer: ShardWriter,
    keep_rounded: bool,
    ranges_of: RangesOf = weight_ranges,
) -> list[WeightError]:
    """Encode the unit's quantized weights and queue this rank's share of their tensors for writing.

    `keep_rounded`: leave decode(encode(w)) in the model instead of w. `ranges_of`: the ranges of some weights. Weights
    are finite (model/finite.py). Every rank calls it, for the same units in the same order.
    """
    weights = weights_of(unit, assignment)
    values = {q: q.view.of(_whole(parameter_of(model, q.view.parameter), q)) for q in weights}
    ranges = ranges_of(values)
    errors: list[WeightError] = []
    for weight, tensor in values.items():
        errors += _quantize_weight(weight, tensor, ranges[weight], share, writer, keep_rounded)
        if keep_rounded and share.is_cut(weight.view):
            _round_rows(weight, parameter_of(model, weight.view.parameter), ranges[weight], share)
    return errors


def weights_of(unit: Unit, assignment: Assignment) -> list[QuantizedWeight]:
    """The unit's quantized weights."""
    inside = set(unit.tensors)
    return [q for q in assignment.quantized if q.view.modules[0] + WEIGHT in inside]


def written_modules(weight: QuantizedWeight, share: Share) -> tuple[str, ...]:
    """The modules of a weight view whose tensors this rank writes."""
    view = weight.view
    if view.is_stacked:
        written = share.written_modules(view)
        return view.modules[written.start : written.stop]
    first = next(iter(codecs()[weight.weight.name].layout(view.shape)))  # all tensors of a module go the same way
    return view.modules if share.writes(f"{view.modules[0]}.{first}") else ()


def _whole(parameter: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The experts that are here, or the whole of a dense weight."""
    return local_of(parameter) if weight.view.is_stacked else full_of(parameter)


def _quantize_weight(
    weight: QuantizedWeight,
    tensor: torch.Tensor,
    amax: torch.Tensor,
    share: Share,
    writer: ShardWriter,
    keep_rounded: bool,
) -> list[WeightError]:
    """Encode one weight, or the experts of a stack that are here, and write what is this rank's to write."""
    view, modules = weight.view, written_modules(weight, share)
    keep_rounded = keep_rounded and not share.is_cut(view)
    if not modules and not keep_rounded:
        return []
    part = slice(None)
    if view.is_stacked:
        held, written = share.held_modules(view), share.written_modules(view)
        part = slice(written.start - held.start, written.stop - held.start)
        if not keep_rounded:
            tensor, amax, part = tensor[part], amax[part], slice(None)
    encoded, signal, noise = _encode(codecs()[weight.weight.name], tensor, amax, keep_rounded)
    if not modules:
        return []
    for local, stored in encoded.items():
        writer.write_stack(
            [f"{module}.{local}" for module in modules], stored[part] if view.is_stacked else stored[None]
        )
    sums = torch.stack([signal, noise])[:, part].tolist()
    kind, name = view.leaf, weight.weight.name
    return [WeightError(m, kind, name, s, n) for m, s, n in zip(modules, *sums, strict=True)]


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


def _encode(
    codec: Codec, tensor: torch.Tensor, amax: torch.Tensor, keep_rounded: bool
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """(stored tensors, sum of w^2, sum of (decoded - w)^2); the sums are fp64, one per matrix."""
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


def write_input_scales(
    assignment: Assignment, quantizers: Mapping[str, Quantizer], share: Share, writer: ShardWriter
) -> dict[str, float]:
    """Write this rank's share of the static activation scales; returns input key -> scale, of all."""
    static = [q for q in assignment.quantized if has_input_scale(q.input)]
    keys = dict.fromkeys(q.input_key for q in static)
    if not keys:
        return {}
    scales = {key: _input_scale(quantizers[key]) for key in keys}
    host = dict(zip(keys, torch.stack(list(scales.values())).cpu(), strict=True))
    for weight in static:
        names = [n for module in weight.view.modules if share.writes(n := f"{module}.{INPUT_SCALE}")]
        writer.write_stack(names, host[weight.input_key].repeat(len(names)))
    return {key: float(scale) for key, scale in host.items()}


def _input_scale(quantizer: Quantizer) -> torch.Tensor:
    scale = quantizer.codec.input_scale(_range(quantizer))
    assert scale is not None
    return scale


def write_kv_scales(
    assignment: Assignment, quantizers: Mapping[str, Quantizer], share: Share, writer: ShardWriter
) -> list[str]:
    """Write this rank's share of the scales of a calibrated KV cache, amax / 448 whatever its format; returns warnings.

    Latent attention has one range for keys and values, which are computed from the same cache.
    """
    layers = _cache_layers(assignment)
    if not layers:
        return []
    quantizer_of = [(quantizers[f"{n}.k"], quantizers.get(f"{n}.v", quantizers[f"{n}.k"])) for n in layers]
    ranges = torch.stack([_range(q) for pair in quantizer_of for q in pair]).cpu().view(-1, 2)
    for layer, pair in zip(layers, scale_of(ranges), strict=True):
        for name, scale in zip(_kv_names(layer), pair, strict=True):
            if share.writes(name):
                writer.write(name, scale)
    dead = [layer for layer, pair in zip(layers, ranges.tolist(), strict=True) if 0 in pair]
    return [f"keys or values of {layer} were zero in every calibration token; their scale is 1.0" for layer in dead]


def _range(quantizer: Quantizer) -> torch.Tensor:
    assert quantizer.amax is not None, f"{quantizer.key} was not calibrated"
    return quantizer.amax.detach()
