"""Which kinds of modules can be quantized, and which of their tensors.

The table is looked up along a module's method resolution order, so that a subclass is treated as its nearest
registered base and is never missed because its exact type is not listed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from hf_ptq.quantization.formats.description import Role


@dataclass(frozen=True)
class ModuleKind:
    """The tensors of a module that a recipe can give formats to."""

    roles: tuple[Role, ...]


KINDS: dict[type[nn.Module], ModuleKind] = {
    nn.Linear: ModuleKind(("weight", "input")),
}


def kind_of(module: nn.Module) -> ModuleKind | None:
    """The kind of the nearest registered base class; None where there is none."""
    return next((KINDS[base] for base in type(module).__mro__ if base in KINDS), None)


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's classes, from its own to nn.Module; what `parent_class` of a rule is compared with."""
    return tuple(base.__name__ for base in type(module).__mro__ if issubclass(base, nn.Module))
