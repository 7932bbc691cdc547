"""What the export holds, to the byte, before any weight exists.

Every tensor of the source is written under its own name, a quantized one as the tensors that the layout stores for
its format. Scales of activations and of the KV cache are planned beside them. A layout that keeps the calibrated
ranges has them in files of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hf_ptq.checkpoint.dtypes import FLOAT_DTYPES, SAFETENSORS_DTYPES, TORCH_DTYPES
from hf_ptq.checkpoint.shards import TensorPlan
from hf_ptq.checkpoint.source import Source
from hf_ptq.export.layouts.fakequant import RANGE
from hf_ptq.export.layouts.layout import WEIGHT_TENSOR, Layout
from hf_ptq.model.units import Unit
from hf_ptq.model.views import WeightView
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.formats.description import NumberFormat


@dataclass
class PlannedTensors:
    """`weights`: the model's files, in the order of the units; `state`: the files of the quantizers' state.

    `module_of`: tensor -> the quantized module that it belongs to. `scales`: tensors that have to be above zero.
    """

    weights: list[TensorPlan] = field(default_factory=list)
    state: list[TensorPlan] = field(default_factory=list)
    module_of: dict[str, str] = field(default_factory=dict)
    scales: set[str] = field(default_factory=set)


def tensor_name(module: str, local: str) -> str:
    """The name of a module's tensor."""
    return f"{module}.{local}"


def tensor_names(view: WeightView, modules: Sequence[str], local: str) -> list[str]:
    """The names of a tensor of some modules of a view; experts that are written as one have one.

    Model Optimizer's names for those: the parameter's own for the weight, `gate_up_proj_weight_scale` for a scale.
    """
    if not view.joined:
        return [tensor_name(module, local) for module in modules]
    if local == WEIGHT_TENSOR:
        return [view.joined]
    return [f"{view.joined}.{local}" if "." in local else f"{view.joined}_{local}"]


def joined_shape(num_experts: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of all experts' tensors together: matrices with rows and inputs exchanged, a number once."""
    return (num_experts, shape[1], shape[0]) if len(shape) == 2 else (num_experts, *shape) if shape else ()


def joined(stack: torch.Tensor) -> torch.Tensor:
    """A stack [experts, ...] as the one tensor that is written; numbers are the same for all."""
    if stack.dim() == 3:
        return stack.transpose(-2, -1).contiguous()
    return stack if stack.dim() > 1 else stack[0]


def taken_apart(tensor: torch.Tensor, expert: int) -> torch.Tensor:
    """One expert's part of such a tensor; the inverse of `joined`."""
    if tensor.dim() == 3:
        return tensor[expert].transpose(-2, -1).contiguous()
    return tensor[expert] if tensor.dim() else tensor


def stored_dtype(view: WeightView, source: Source, default: torch.dtype = torch.bfloat16) -> torch.dtype:
    """The dtype of the view's weights in the source; `default` where that is none to compute with."""
    stored = source.tensors[view.tensors[0]].dtype
    return TORCH_DTYPES[stored] if stored in FLOAT_DTYPES else default


def plan_tensors(units: Sequence[Unit], source: Source, assignment: Assignment, layout: Layout) -> PlannedTensors:
    """What the export holds, exact before any weight is loaded. Scales of the KV cache come last."""
    quantized = assignment.by_tensor
    planned = PlannedTensors()
    for unit in units:
        for name in unit.tensors:
            weights = quantized.get(name)
            if weights is None:
                entry = source.tensors[name]
                planned.weights.append(TensorPlan(name, entry.dtype, entry.shape))
            for weight in weights or ():
                if name == weight.view.tensors[0]:
                    _plan_weight(weight, stored_dtype(weight.view, source), layout, planned)
    for layer in cache_layers(assignment):
        names = kv_names(layout, layer)
        (planned.state if layout.keeps_ranges else planned.weights).extend(
            TensorPlan(name, "F32", layout.kv_shape) for name in names
        )
        planned.scales.update(() if layout.keeps_ranges else names)
    return planned


def cache_layers(assignment: Assignment) -> list[str]:
    """The source's names of the attention modules whose cache has scales to store."""
    cache = assignment.kv
    return list(cache.layers.values()) if cache is not None and cache.needs_data else []


def kv_names(layout: Layout, layer: str) -> tuple[str, str]:
    """Where the scales of a layer's keys and values are; planning refuses layouts that have no place for them."""
    assert layout.kv_names is not None, f"{layout.name} has no scales of a KV cache"
    return layout.kv_names(layer)


def has_input_scale(number_format: NumberFormat | None) -> bool:
    """True where a static activation scale is stored."""
    return number_format is not None and number_format.needs_data


def _plan_weight(weight: QuantizedWeight, dtype: torch.dtype, layout: Layout, planned: PlannedTensors) -> None:
    """The tensors of a view; those of all experts by kind, so that a stack lies in the file as it does in memory."""
    storage = layout.stored(weight.scheme)
    state = planned.state if layout.keeps_ranges else planned.weights
    for local, (stored, shape) in storage.layout(weight.view.shape, dtype).items():
        _add(planned, planned.weights, weight, (local, SAFETENSORS_DTYPES[stored], shape))
    shape = range_shape(weight)
    if layout.keeps_ranges and shape is not None:
        _add(planned, state, weight, (RANGE, "F32", shape))
    if storage.input is not None and has_input_scale(weight.input):
        _add(planned, state, weight, (storage.input.name, "F32", storage.input.shape))
    for local in _scales(layout, weight):
        planned.scales.update(tensor_names(weight.view, weight.view.modules, local))


def range_shape(weight: QuantizedWeight) -> tuple[int, ...] | None:
    """The shape of a module's ranges: of the whole weight, of each row or of each block; None for those at hand."""
    number_format, (outputs, inputs) = weight.weight, weight.view.shape
    if number_format.is_dynamic:
        return None
    if number_format.is_shared:
        return ()
    if number_format.granularity == "channel":
        return (outputs,)
    return -(-outputs // number_format.block_rows), -(-inputs // number_format.input_multiple)


def _scales(layout: Layout, weight: QuantizedWeight) -> Iterator[str]:
    storage = layout.stored(weight.scheme)
    yield from storage.scales
    if storage.input is not None and storage.input.is_scale and has_input_scale(weight.input):
        yield storage.input.name


def _add(
    planned: PlannedTensors,
    place: list[TensorPlan],
    weight: QuantizedWeight,
    tensor: tuple[str, str, tuple[int, ...]],
) -> None:
    """One tensor for each module of the view."""
    local, dtype, shape = tensor
    view = weight.view
    if view.joined:
        shape = joined_shape(len(view.modules), shape)
    names = tensor_names(view, view.modules, local)
    for name, module in zip(names, (view.joined,) if view.joined else view.modules, strict=True):
        place.append(TensorPlan(name, dtype, shape))
        planned.module_of[name] = module
