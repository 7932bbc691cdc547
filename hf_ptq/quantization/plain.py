"""From a recipe and any torch module to quantizers: for models that stay in PyTorch.

Every module of a registered kind is asked for by its name; the last rule that matches decides, as for exports. A
module that a rule turns off still holds the quantizers that an earlier rule gives it, disabled, so that it can be
turned on. Nothing is fused: each tensor has a range of its own. What a format cannot take (blocks need 16 inputs in a
row, and the channels in the last dimension) is left alone with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from hf_ptq.errors import Problem, UserError
from hf_ptq.model.experts import INPUT_QUANTIZER, takes_registry
from hf_ptq.model.views import WeightView
from hf_ptq.model.wrappers import named
from hf_ptq.quantization.assignment import QuantizedWeight
from hf_ptq.quantization.attach import weight_quantizer_name
from hf_ptq.quantization.formats.description import FORMATS, NumberFormat
from hf_ptq.quantization.modules import ModuleKind, class_names, kind_of
from hf_ptq.quantization.notices import unfit_warnings
from hf_ptq.quantization.quantizer import Quantizer, Slot
from hf_ptq.quantization.recipe import Recipe
from hf_ptq.quantization.rules import LINEAR, Known, Place, Tensor

_ROUNDABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PlainTensor:
    """One tensor that gets a quantizer: child `name` of the module `owner`."""

    owner: str
    name: str
    format: NumberFormat
    slot: Slot
    is_enabled: bool


def assign_plain(recipe: Recipe, model: nn.Module) -> tuple[list[PlainTensor], list[str]]:
    """What of `model` the recipe quantizes, and warnings. Raises UserError if that is nothing or cannot be reached."""
    modules = {name: module for name, module in named(model).items() if not isinstance(module, Quantizer)}
    found: list[PlainTensor] = []
    unfit: list[tuple[str, str, str]] = []
    for name, module in modules.items():
        tensors, reason = _of_module(recipe, name, module)
        found += tensors
        unfit += [(name, type(module).__name__, reason)] if reason else []
    warnings = unfit_warnings(unfit)
    problems = [*_unreachable(recipe, modules)]
    if not any(tensor.is_enabled for tensor in found) and not problems:
        kinds = sorted({type(m).__name__ for m in modules.values() if kind_of(m) is not None})
        cure = (
            f"its modules of known kinds: {', '.join(kinds) or 'none'}; {'; '.join(warnings[:3]) or 'no rule matches'}"
        )
        problems.append(Problem(f"recipe {recipe.name} quantizes nothing in {type(model).__name__}", cure))
    if problems:
        raise UserError(*problems)
    return found, [*recipe.notes, *warnings, *_unmatched(recipe, modules)]


def attach_plain(model: nn.Module, tensors: list[PlainTensor]) -> None:
    """Give the modules their quantizers, switched off and without ranges."""
    modules = named(model)
    for tensor in tensors:
        prefix = f"{tensor.owner}." if tensor.owner else ""
        quantizer = Quantizer(f"{prefix}{tensor.name}", tensor.format, slot=tensor.slot)
        quantizer.is_enabled = tensor.is_enabled
        quantizer.names = (tensor.owner or "*",)
        modules[tensor.owner].add_module(tensor.name, quantizer)


def plain_weight(name: str, quantizer: Quantizer, module: nn.Module) -> QuantizedWeight:
    """The weight of the quantizer `name` of `module` as algorithms know weights: a matrix by itself."""
    owner, leaf = name.rpartition(".")[0], quantizer.slot.leaf
    parameter = module._parameters[leaf]
    assert parameter is not None
    rows = quantizer.slot.channels
    view = WeightView((owner,), f"{owner}.{leaf}" if owner else leaf, (rows, parameter.numel() // rows))
    return QuantizedWeight(view, quantizer.format, None, view.parameter, "")


def plain_matrix(parameter: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """A whole weight as [out, rest]."""
    moved = parameter.movedim(quantizer.slot.channel_dim, 0)
    return moved.reshape(moved.shape[0], -1)


def _of_module(recipe: Recipe, name: str, module: nn.Module) -> tuple[list[PlainTensor], str]:
    """The module's tensors that get quantizers, and why it gets none although a rule gives it formats."""
    kind = kind_of(module)
    if kind is None:
        return [], ""
    place = _place(name, module)
    tensors: list[PlainTensor] = []
    reasons: list[str] = []

    def give(tensor: PlainTensor, problems: Iterator[str]) -> None:
        child = module._modules.get(tensor.name)
        is_taken = child is not None and not isinstance(child, Quantizer)
        taken = [f"it has a child {tensor.name} of its own"] if is_taken else []
        if found := [*problems, *taken]:
            reasons.extend(found[:1] if tensor.is_enabled else [])
        else:
            tensors.append(tensor)

    weight, is_on = _given(recipe, "weight", place)
    if weight is not None and kind.weights:
        reasons += _module_problem(kind, module) if is_on else []
        for leaf in kind.leaves(module):
            parameter = module._parameters[leaf]
            assert parameter is not None
            rows = 0 if isinstance(parameter, UninitializedParameter) else parameter.shape[kind.out_dim]
            tensor = PlainTensor(
                name, weight_quantizer_name(leaf), weight, Slot("weight", leaf, kind.out_dim, rows), is_on
            )
            give(tensor, _weight_problem(weight, parameter, kind))
    inputs, is_on = _given(recipe, "input", place)
    if inputs is not None and kind.channel_dim is not None:
        channels = kind.num_channels(module)
        slot = Slot("input", "", kind.channel_dim, channels or 1)
        give(PlainTensor(name, INPUT_QUANTIZER, inputs, slot, is_on), _input_problem(inputs, kind, channels))
    return ([], reasons[0]) if reasons else (tensors, "")


def _module_problem(kind: ModuleKind, module: nn.Module) -> Iterator[str]:
    if isinstance(module, NonDynamicallyQuantizableLinear):
        yield "attention reads its weight and never calls it"
    elif not any(kind.leaves(module)) or (isinstance(module, nn.RNNBase) and not _has_its_weights(module)):
        yield f"no parameter of its own is a {' or '.join(kind.weights)}; quantize before parametrizing or pruning it"


def _has_its_weights(module: nn.RNNBase) -> bool:
    return all(name in module._parameters for name in module._flat_weights_names)


def _place(name: str, module: nn.Module) -> Place:
    return Place((name,), class_names(module))


def _given(recipe: Recipe, tensor: Tensor, place: Place) -> tuple[NumberFormat | None, bool]:
    """The format that the rules give a tensor, and whether it is on: rules that turn a module off leave the format."""
    is_enabled: bool | None = None
    for rule in reversed(recipe.rules):
        said = rule.says(tensor, place)
        if said is None:
            continue
        is_enabled = said.enable if is_enabled is None else is_enabled
        if said.format is not None and said.enable:
            return FORMATS[said.format], is_enabled
        if rule.enable and not said.enable:  # gives the module's other tensor a format, and this one none
            return None, False
    return None, False


def _weight_problem(number_format: NumberFormat, parameter: torch.Tensor, kind: ModuleKind) -> Iterator[str]:
    if isinstance(parameter, UninitializedParameter):
        yield "its weight has no shape yet; run the model once"
    elif parameter.dtype not in _ROUNDABLE:
        yield f"its weight is of {parameter.dtype}"
    elif parameter.numel() == 0:
        yield "its weight is empty"
    elif number_format.block_size is None:
        return
    elif parameter.dim() != 2 or kind.out_dim != 0:
        yield f"{number_format.name} needs weights [out, in], a {kind.name} has others"
    elif parameter.shape[1] % number_format.block_size:
        yield f"{parameter.shape[1]} inputs are no multiple of {number_format.block_size}"
    elif parameter.shape[0] % number_format.packed_rows:
        yield f"{parameter.shape[0]} rows are no multiple of {number_format.packed_rows}"


def _input_problem(number_format: NumberFormat, kind: ModuleKind, channels: int | None) -> Iterator[str]:
    if number_format.granularity in ("token", "block") and kind.channel_dim != -1:
        yield f"{number_format.name} needs inputs [..., channels], a {kind.name} has others"
    elif number_format.block_size is not None and channels is not None and channels % number_format.block_size:
        yield f"{channels} inputs are no multiple of {number_format.block_size}"
    elif number_format.granularity == "channel" and channels is None:
        yield f"a {kind.name} does not know how many channels its input has, as {number_format.name} needs"


def _unreachable(recipe: Recipe, modules: dict[str, nn.Module]) -> Iterator[Problem]:
    """Stacked experts inside of something that is no transformers model itself, which the recipe wants quantized."""
    for name, module in modules.items():
        if takes_registry(module) and any(_given(recipe, tensor, _place(name, module))[1] for tensor in LINEAR):
            what = f"{name} holds the experts of a transformers model, inside of a {type(modules['']).__name__}"
            yield Problem(what, "give the transformers model itself, or leave the experts out by a rule")


def _unmatched(recipe: Recipe, modules: dict[str, nn.Module]) -> list[str]:
    holders = frozenset(name for name, module in modules.items() if module._modules and kind_of(module) is None)
    known = Known(tuple(_place(name, module) for name, module in modules.items()), holders)
    return [
        f"recipe {recipe.name}: {what}"
        for rule in recipe.rules
        if not rule.speaks_of.isdisjoint(LINEAR)
        for what in rule.unmatched(known)
    ]
