"""Quantizers on a model: attached to modules by the assignment, switched together.

An input quantizer is a submodule `input_quantizer` of its linear; stacked experts hold one for each of their two
products, called by `model/experts.py`. Quantizers of weights are for models that are trained, or run rounded, with
their weights as they are; the command rounds the weights themselves. How a submodule gets called is told in attach.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from hf_ptq.model.attention import (
    K_QUANTIZER,
    V_QUANTIZER,
    attach_latent_quantizer,
    is_latent,
    use_our_attention,
)
from hf_ptq.model.experts import DOWN_INPUT_QUANTIZER, INPUT_QUANTIZER
from hf_ptq.model.wrappers import named
from hf_ptq.quantization.affine import AffineQuantizer
from hf_ptq.quantization.assignment import Assignment, QuantizedWeight
from hf_ptq.quantization.attach import weight_quantizer_name
from hf_ptq.quantization.formats.description import NumberFormat
from hf_ptq.quantization.quantizer import Mode, Quantizer, Slot


def attach_quantizers(
    model: PreTrainedModel, assignment: Assignment, run_experts: Callable[[int], range] = range
) -> dict[str, Quantizer]:
    """Quantizers of all activations, switched off: by input key for linears, by module name for keys and values.

    The model then runs our experts, and our attention where keys and values are quantized. `run_experts`: number of
    experts -> those whose rows come to this process.
    """
    quantizers = _attach_input_quantizers(model, assignment, run_experts) | _attach_kv_quantizers(model, assignment)
    if assignment.kv is not None:
        use_our_attention(model)
    return quantizers


def _attach_input_quantizers(
    model: nn.Module, assignment: Assignment, run_experts: Callable[[int], range]
) -> dict[str, Quantizer]:
    modules = named(model)
    quantizers: dict[str, Quantizer] = {}
    for weight in assignment.quantized:
        if weight.input is None:
            continue
        view = weight.view
        quantizer = quantizers.get(weight.input_key)
        if quantizer is None:
            experts = len(view.modules) if view.is_stacked else None
            run = run_experts(experts) if experts is not None else None
            quantizer = quantizers[weight.input_key] = Quantizer(weight.input_key, weight.input, experts, run)
            quantizer.names = view.modules
        else:
            quantizer.is_shared = True
            quantizer.names += view.modules
        module = modules[view.owner]
        if view.is_stacked:
            is_down = view.parameter.endswith(".down_proj")
            module.add_module(DOWN_INPUT_QUANTIZER if is_down else INPUT_QUANTIZER, quantizer)
        else:
            module.add_module(INPUT_QUANTIZER, quantizer)
    return quantizers


def _attach_kv_quantizers(model: nn.Module, assignment: Assignment) -> dict[str, Quantizer]:
    """By the source's name of the attention module and `.k` or `.v`; latent attention has `.k` alone, for both."""
    quantizers: dict[str, Quantizer] = {}
    cache = assignment.kv
    if cache is None:
        return quantizers
    modules = named(model)
    for name, source_name in cache.layers.items():
        module = modules[name]
        keys = quantizers[f"{source_name}.k"] = _cache_quantizer(f"{source_name}.k", cache.k, module, "k_proj")
        if cache.mla == "latent" and is_latent(module):
            attach_latent_quantizer(module, keys)
            continue
        values = quantizers[f"{source_name}.v"] = _cache_quantizer(f"{source_name}.v", cache.v, module, "v_proj")
        module.add_module(K_QUANTIZER, keys)
        module.add_module(V_QUANTIZER, values)
    return quantizers


def _cache_quantizer(key: str, number_format: NumberFormat, attention: nn.Module, projection: str) -> Quantizer:
    if not number_format.has_bias:
        return Quantizer(key, number_format)
    linear = named(attention)[projection]
    assert isinstance(linear, nn.Linear)  # as decide_cache has seen
    return AffineQuantizer(key, number_format, linear.out_features)


def attach_weight_quantizers(model: nn.Module, assignment: Assignment) -> dict[QuantizedWeight, Quantizer]:
    """Quantizers of all weights, switched off and without ranges; a stack's are in the order of its rows."""
    modules = named(model)
    quantizers: dict[QuantizedWeight, Quantizer] = {}
    parts: dict[str, int] = {}
    for weight in sorted(assignment.quantized, key=lambda q: q.view.start_row):
        view = weight.view
        leaf = view.parameter.rpartition(".")[2]
        part = parts[view.parameter] = parts.get(view.parameter, -1) + 1
        rows = (view.start_row, view.shape[0]) if view.is_stacked else None
        slot = Slot("weight", leaf, 0, view.shape[0], rows)
        own = f"{view.stack}.{view.leaf}" if view.is_stacked else view.modules[0]
        key = weight.group if weight.weight.is_shared else own
        experts = len(view.modules) if view.is_stacked else None
        quantizers[weight] = quantizer = Quantizer(key, weight.weight, experts, slot=slot)
        modules[view.owner].add_module(weight_quantizer_name(leaf, part), quantizer)
    return quantizers


@contextmanager
def quantizing(quantizers: Iterable[Quantizer]) -> Iterator[None]:
    """Activations are rounded inside the block, as a server does; statistics are off."""
    switched = list(quantizers)
    set_mode(switched, "quantize")
    try:
        yield
    finally:
        set_mode(switched, "off")


@contextmanager
def not_observing(quantizers: Iterable[Quantizer]) -> Iterator[None]:
    """Inside the block these see nothing; what they had recorded stays."""
    observing = [quantizer for quantizer in quantizers if quantizer.mode == "observe"]
    set_mode(observing, "off")
    try:
        yield
    finally:
        set_mode(observing, "observe")


def set_mode(quantizers: Iterable[Quantizer], mode: Mode) -> None:
    """Switch them all."""
    for quantizer in quantizers:
        quantizer.mode = mode
