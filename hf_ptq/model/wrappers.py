"""Names of modules as they are without what distributed training, compilation and checkpointing wrap around them.

DistributedDataParallel, torch.compile and activation checkpointing put a module inside another one, and a word into
the names below it (`module.`, `_orig_mod.`, `_checkpoint_wrapped_module.`). Here the wrapped module takes the wrapper's
place. (FSDP2 wraps nothing: it changes the class of a module to a subclass.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of all wrappers."""
    while True:
        leaf = next((WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in WRAPPERS), None)
        inner = None if leaf is None else module._modules.get(leaf)
        if inner is None:
            return module
        module = inner


def named(model: nn.Module, every_name: bool = False) -> dict[str, nn.Module]:
    """Name -> module, wrappers left out; a module that has several names has its first, or `every_name`."""
    seen: set[int] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        module = unwrapped(module)
        if every_name or id(module) not in seen:
            seen.add(id(module))
            yield prefix, module
            for leaf, child in module._modules.items():
                if child is not None:
                    yield from walk(f"{prefix}.{leaf}" if prefix else leaf, child)

    return dict(walk("", model))


def named_tensors(model: nn.Module, every_name: bool = False) -> dict[str, torch.Tensor]:
    """Name -> parameter or persistent buffer, as the `state_dict` of a model without wrappers has them.

    Modules that have several names are in it once, or, as in a `state_dict`, under `every_name`.
    """
    found: dict[str, torch.Tensor] = {}
    for name, module in named(model, every_name).items():
        buffers = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for leaf, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None:
                found[f"{name}.{leaf}" if name else leaf] = tensor
    return found


def parameter_of(model: nn.Module, name: str) -> torch.Tensor:
    """The parameter of that name. Raises KeyError where there is none."""
    *parts, leaf = name.split(".")
    module = unwrapped(model)
    for part in parts:
        child = module._modules[part]
        if child is None:
            raise KeyError(name)
        module = unwrapped(child)
    parameter = module._parameters[leaf]
    if parameter is None:
        raise KeyError(name)
    return parameter
