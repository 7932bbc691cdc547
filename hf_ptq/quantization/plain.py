"""From a recipe and any torch module to quantizers: for models that stay in PyTorch.

Every module of a registered kind is asked for by its name; the last rule that matches decides, as for exports. A
module that a rule turns off still holds the quantizers that an earlier rule gives it, disabled, so that it can be
turned on. Nothing is fused: each tensor has a range of its own. What a format cannot take (blocks need 16 inputs in a
row, and the channels in the last dimension) is left alone with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from hf_ptq.errors import Problem, UserError
from hf_ptq.model.experts import INPUT_QUANTIZER, takes_registry
from hf_ptq.model.wrappers import named
from hf_ptq.quantization.attach import weight_quantizer_name
from hf_ptq.quantization.formats.description import FORMATS, NumberFormat
from hf_ptq.quantization.modules import ModuleKind, class_names, kind_of
from hf_ptq.quantization.quantizer import Quantizer, Slot
from hf_ptq.quantization.ranges import matrix_amax
from hf_ptq.quantization.recipe import Recipe, Rule


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
    warnings: list[str] = []
    for name, module in modules.items():
        tensors, reason = _of_module(recipe, name, module)
        found += tensors
        warnings += [f"{name} is left unquantized: {reason}"] if reason else []
    problems = [*_unreachable(recipe, modules)]
    if not any(tensor.is_enabled for tensor in found) and not problems:
        kinds = sorted({type(m).__name__ for m in modules.values() if kind_of(m) is not None})
        cure = (
            f"its modules of known kinds: {', '.join(kinds) or 'none'}; {'; '.join(warnings[:3]) or 'no rule matches'}"
        )
        problems.append(Problem(f"recipe {recipe.name} quantizes nothing in {type(model).__name__}", cure))
    if problems:
        raise UserError(*problems)
    return found, [*warnings, *_unmatched(recipe, modules)]


def attach_plain(model: nn.Module, tensors: list[PlainTensor]) -> None:
    """Give the modules their quantizers, switched off and without ranges."""
    modules = named(model)
    for tensor in tensors:
        prefix = f"{tensor.owner}." if tensor.owner else ""
        quantizer = Quantizer(f"{prefix}{tensor.name}", tensor.format, slot=tensor.slot)
        quantizer.is_enabled = tensor.is_enabled
        modules[tensor.owner].add_module(tensor.name, quantizer)


def plain_amax(parameter: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """The range of a whole weight: max |w| over it, fp32 scalar, or over each output, fp32 [out]."""
    moved = parameter.movedim(quantizer.slot.channel_dim, 0)
    return matrix_amax(moved.reshape(moved.shape[0], -1), quantizer.format)


def _of_module(recipe: Recipe, name: str, module: nn.Module) -> tuple[list[PlainTensor], str]:
    """The module's tensors that get quantizers, and why it gets none although a rule gives it formats."""
    kind = kind_of(module)
    matching = [rule for rule in recipe.rules if rule.decides_linears and _matches(rule, name, module)]
    giving = next((rule for rule in reversed(matching) if rule.enable), None)
    if kind is None or giving is None:
        return [], ""
    is_enabled = matching[-1].enable
    tensors: list[PlainTensor] = []
    reasons: list[str] = []
    if giving.weight is not None:
        number_format = FORMATS[giving.weight]
        for leaf in kind.leaves(module):
            parameter = module._parameters[leaf]
            assert parameter is not None
            slot = Slot("weight", leaf, kind.out_dim, parameter.shape[kind.out_dim])
            reasons += _weight_problem(number_format, parameter, kind)
            tensors.append(PlainTensor(name, weight_quantizer_name(leaf), number_format, slot, is_enabled))
    if giving.input is not None and kind.channel_dim is not None:
        number_format, channels = FORMATS[giving.input], kind.num_channels(module)
        slot = Slot("input", "", kind.channel_dim, channels or 1)
        reasons += _input_problem(number_format, kind, channels)
        tensors.append(PlainTensor(name, INPUT_QUANTIZER, number_format, slot, is_enabled))
    return ([], reasons[0] if is_enabled else "") if reasons else (tensors, "")


def _matches(rule: Rule, name: str, module: nn.Module) -> bool:
    if rule.parent_class and not set(rule.parent_class) & set(class_names(module)):
        return False
    return any(fnmatchcase(name, pattern) for pattern in rule.pattern)


def _weight_problem(number_format: NumberFormat, parameter: torch.Tensor, kind: ModuleKind) -> Iterator[str]:
    if number_format.block_size is None:
        return
    if parameter.dim() != 2 or kind.out_dim != 0:
        yield f"{number_format.name} needs weights [out, in], a {kind.name} has others"
    elif parameter.shape[1] % number_format.block_size:
        yield f"{parameter.shape[1]} inputs are no multiple of {number_format.block_size}"


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
        matching = [rule for rule in recipe.rules if rule.decides_linears and _matches(rule, name, module)]
        if takes_registry(module) and matching and matching[-1].enable:
            what = f"{name} holds the experts of a transformers model, inside of a {type(modules['']).__name__}"
            yield Problem(what, "give the transformers model itself, or leave the experts out by a rule")


def _unmatched(recipe: Recipe, modules: dict[str, nn.Module]) -> list[str]:
    return [
        f"recipe {recipe.name}: pattern {pattern!r} matches no module"
        for rule in recipe.rules
        if not rule.optional and rule.decides_linears
        for pattern in rule.pattern
        if not any(fnmatchcase(name, pattern) for name in modules)
    ]
