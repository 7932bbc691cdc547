"""A quantizer works because a module holds it: hooks call it, wherever the module came from.

    NAME_quantizer                       rounds the parameter NAME for the length of the forward
    input_quantizer                      rounds the first argument (experts call theirs: model/experts.py)

No class is swapped and no forward replaced. In the forward the rounded weight stands in the module's `__dict__`, where
Python finds it before the parameter, which stays registered, shared, sharded and trained as it is. Recurrent modules
read a list of their parameters instead, which is set in its place in the same way.

`SyncBatchNorm.convert_sync_batchnorm` and its like build a plain module and hand the children over, without hooks.
Therefore hooks are set where a quantizer becomes a child of a module, by whomever (torch's hook on registration): a
module cannot hold one that it does not call. A class that no kind is registered for raises at that moment. What drops
children as well is found by `changes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.rnn import PackedSequence

from hf_ptq.errors import Problem, RunError
from hf_ptq.model.attention import K_QUANTIZER, OUTPUT_QUANTIZER, V_QUANTIZER, quantize_output
from hf_ptq.model.experts import DOWN_INPUT_QUANTIZER, INPUT_QUANTIZER, takes_registry
from hf_ptq.model.wrappers import named
from hf_ptq.quantization.assignment import QuantizedWeight
from hf_ptq.quantization.modules import kind_of
from hf_ptq.quantization.quantizer import Quantizer

_SUFFIX = "_quantizer"
_FLAT_WEIGHTS = "_flat_weights"
# Quantizers that are called by name, by experts and attention.
_CALLED_BY_NAME = (K_QUANTIZER, V_QUANTIZER, OUTPUT_QUANTIZER, DOWN_INPUT_QUANTIZER, "quantizer")


def weight_quantizer_name(leaf: str, part: int = 0) -> str:
    """The child that rounds the parameter `leaf`, or part of a stack of experts."""
    return f"{leaf}{_SUFFIX}" if part == 0 else f"{leaf}{_SUFFIX}_{part}"


def quantizers_on(model: nn.Module) -> dict[str, Quantizer]:
    """Name -> quantizer, wrappers left out of the names; one that several modules share has the first's."""
    return {name: module for name, module in named(model).items() if isinstance(module, Quantizer)}


def weight_quantizer_of(module: nn.Module, weight: QuantizedWeight) -> Quantizer:
    """The quantizer that rounds a view of one of the module's parameters."""
    leaf = weight.view.parameter.rpartition(".")[2]
    start = weight.view.start_row
    return next(
        child
        for child in module._modules.values()
        if isinstance(child, Quantizer) and child.slot.leaf == leaf and (child.slot.rows or (0, 0))[0] == start
    )


def detach(model: nn.Module) -> None:
    """Take every quantizer off again, and the hooks."""
    for module in named(model).values():
        for leaf in [leaf for leaf, child in module._modules.items() if _is_ours(leaf, child)]:
            del module._modules[leaf]
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in _HOOKS]:
                del hooks[key]
                for marks in (module._forward_pre_hooks_with_kwargs, module._forward_hooks_always_called):
                    marks.pop(key, None)


def _is_ours(leaf: str, child: nn.Module | None) -> bool:
    return isinstance(child, Quantizer) or (child is not None and leaf in (K_QUANTIZER, V_QUANTIZER))


def changes(model: nn.Module, expected: Mapping[str, str]) -> list[Problem]:
    """What has happened to the quantizers (name -> format) of a model since they were attached.

    They should be there, be the same, and round a parameter of their module.
    """
    found, modules = quantizers_on(model), named(model)
    lost = [name for name in expected if name not in found]
    if lost:
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in lost))
        shown = ", ".join(owners[:5]) + (f" ... ({len(owners)})" if len(owners) > 5 else "")
        what = f"these modules were quantized, and have been replaced by ones that hold no quantizer: {shown}"
        return [Problem(what, "quantize after replacing modules: hf_ptq.quantize, or restore_quantizers")]
    others = [name for name, own in expected.items() if found[name].format.name != own]
    if others:
        what = f"{others[0]} has another format than the model was quantized with: a part was quantized by itself"
        return [Problem(what, "quantize the whole model, by one recipe")]
    problems = []
    for name, quantizer in found.items():
        owner, leaf = modules[name.rpartition(".")[0]], quantizer.slot.leaf
        if quantizer.is_weight and leaf not in owner._parameters:
            problems.append(_moved_away(type(owner).__name__, name, leaf))
    return problems


def _moved_away(owner: str, name: str, leaf: str) -> Problem:
    what = f"{name} rounds the parameter {leaf!r} of a {owner}, which has none of that name any more"
    return Problem(what, "parametrize and prune models that are not quantized; bake it in, then hf_ptq.quantize again")


# --- hooks ---------------------------------------------------------------------------------------


def _on_registration(module: nn.Module, name: str, child: nn.Module | None) -> None:
    """torch calls it for every child of every module."""
    if not isinstance(child, Quantizer) or name in _CALLED_BY_NAME:
        return
    is_experts = takes_registry(module)
    if kind_of(module) is None and not is_experts:
        what = f"a {type(module).__name__} holds a quantizer, and is no kind that can be quantized"
        raise RunError(Problem(what, f"hf_ptq.register({type(module).__name__})"))
    if child.is_weight:
        if _round_weights not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_round_weights)
            module.register_forward_hook(_restore_weights, always_call=True)
    elif name == INPUT_QUANTIZER and not is_experts and _round_input not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_round_input, with_kwargs=True)


def _round_input(
    module: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    quantizer = module.input_quantizer
    if arguments:
        return (_rounded(quantizer, arguments[0]), *arguments[1:]), options
    name = "input" if "input" in options else _first_parameter(type(module))
    if name not in options:
        what = f"{quantizer.key}: its module was called without {name!r}, which it rounds"
        raise RunError(Problem(what, "a module that can be quantized takes its input as the first argument"))
    return arguments, {**options, name: _rounded(quantizer, options[name])}


@cache
def _first_parameter(module_type: type[nn.Module]) -> str:
    """The name under which `forward` takes its first argument."""
    return next(iter(list(signature(module_type.forward).parameters)[1:]), "")


def _rounded(quantizer: Quantizer, values: Any) -> Any:
    if isinstance(values, PackedSequence):
        return values._replace(data=quantizer(values.data))
    return quantizer(values)


def _round_weights(module: nn.Module, _arguments: tuple[Any, ...]) -> None:
    rounded: dict[str, list[torch.Tensor]] = {}
    for child in module._modules.values():
        if isinstance(child, Quantizer) and child.is_weight:
            slot = child.slot
            parameter = module._parameters.get(slot.leaf)
            if parameter is None:
                raise RunError(_moved_away(type(module).__name__, child.key, slot.leaf))
            part = parameter if slot.rows is None else parameter.narrow(-2, *slot.rows)
            rounded.setdefault(slot.leaf, []).append(child(part))
    weights = {leaf: parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2) for leaf, parts in rounded.items()}
    if isinstance(module, nn.RNNBase):
        names = module._flat_weights_names
        module.__dict__[_FLAT_WEIGHTS] = [weights.get(name, module._parameters[name]) for name in names]
    else:
        for leaf, weight in weights.items():
            module.__dict__[leaf] = weight


def _restore_weights(module: nn.Module, _arguments: tuple[Any, ...], _output: Any) -> None:
    if isinstance(module, nn.RNNBase):
        module.__dict__[_FLAT_WEIGHTS] = [module._parameters[name] for name in module._flat_weights_names]
        return
    for child in module._modules.values():
        if isinstance(child, Quantizer) and child.is_weight:
            module.__dict__.pop(child.slot.leaf, None)


_HOOKS = (_round_input, _round_weights, _restore_weights, quantize_output)
register_module_module_registration_hook(_on_registration)
