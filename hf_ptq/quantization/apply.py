"""Quantizers on a model: attached to modules by the assignment, switched together.

An input quantizer is a submodule `input_quantizer` of its linear, called by a forward pre-hook; stacked experts hold
one for each of their two products, called by `model/experts.py`. No class is swapped
and no forward replaced, so that what others put there (sharding, expert dispatch) stays in force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

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
from hf_ptq.quantization.affine import AffineQuantizer
from hf_ptq.quantization.assignment import Assignment
from hf_ptq.quantization.formats.description import NumberFormat
from hf_ptq.quantization.quantizer import Mode, Quantizer


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
        module = model.get_submodule(view.owner)
        if view.is_stacked:
            is_down = view.parameter.endswith(".down_proj")
            module.add_module(DOWN_INPUT_QUANTIZER if is_down else INPUT_QUANTIZER, quantizer)
        else:
            module.add_module(INPUT_QUANTIZER, quantizer)
            module.register_forward_pre_hook(_quantize_input)
    return quantizers


def _attach_kv_quantizers(model: nn.Module, assignment: Assignment) -> dict[str, Quantizer]:
    """By the source's name of the attention module and `.k` or `.v`; latent attention has `.k` alone, for both."""
    quantizers: dict[str, Quantizer] = {}
    cache = assignment.kv
    if cache is None:
        return quantizers
    for name, source_name in cache.layers.items():
        module = model.get_submodule(name)
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
    linear = attention.get_submodule(projection)
    assert isinstance(linear, nn.Linear)  # as decide_cache has seen
    return AffineQuantizer(key, number_format, linear.out_features)


def _quantize_input(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    quantizer: Any = module.input_quantizer
    return (quantizer(arguments[0]), *arguments[1:])


@contextmanager
def quantizing(quantizers: Iterable[Quantizer]) -> Iterator[None]:
    """Activations are rounded inside the block, as a server does; statistics are off."""
    switched = list(quantizers)
    _set_mode(switched, "quantize")
    try:
        yield
    finally:
        _set_mode(switched, "off")


@contextmanager
def not_observing(quantizers: Iterable[Quantizer]) -> Iterator[None]:
    """Inside the block these see nothing; what they had recorded stays."""
    observing = [quantizer for quantizer in quantizers if quantizer.mode == "observe"]
    _set_mode(observing, "off")
    try:
        yield
    finally:
        _set_mode(observing, "observe")


def _set_mode(quantizers: Iterable[Quantizer], mode: Mode) -> None:
    for quantizer in quantizers:
        quantizer.mode = mode
