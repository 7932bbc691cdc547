"""Units: the parts of a model that are loaded, calibrated, quantized and exported by themselves.

The embedding part, each decoder layer, the rest. A unit owns parameters (and buffers) by the prefix of their names;
source tensors belong to the unit of the parameter that they fill, and what the model never builds is a last unit of
its own that is only carried over. A driver decides the order of the steps: all units per step, or all steps per unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from hf_ptq.checkpoint.names import Placement

CARRIED = "carried over"


@dataclass(frozen=True)
class Unit:
    """A part of the model: the source tensors that make it up, in the source's order."""

    name: str
    tensors: tuple[str, ...]

    @property
    def is_carried(self) -> bool:
        """True for the tensors that the model never builds: their bytes are copied."""
        return self.name == CARRIED


def find_decoder_layers(model: nn.Module) -> str:
    """Name of the module list that holds the decoder layers: the outermost one with the most parameters.

    Empty where the model has no module list.
    """
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in sizes)
        if isinstance(module, nn.ModuleList) and not nested:
            sizes[name] = sum(p.numel() for p in module.parameters())
    return max(sizes, key=lambda name: sizes[name]) if sizes else ""


def split_units(model: PreTrainedModel, placements: Mapping[str, Placement]) -> tuple[Unit, ...]:
    """Units in the order of a forward pass; every source tensor is in exactly one."""
    layers = find_decoder_layers(model)
    embedding = next((name for name, m in model.named_modules() if m is model.get_input_embeddings()), "")
    members: dict[str, list[str]] = {"embedding": []}
    if layers:
        members |= {f"{layers}.{i}": [] for i in range(len(model.get_submodule(layers)))}  # type: ignore[arg-type]
    members |= {"rest": [], CARRIED: []}
    for name, placement in placements.items():
        members[_unit_of(placement.parameter, layers, embedding)].append(name)
    return tuple(Unit(name, tuple(tensors)) for name, tensors in members.items() if tensors)


def _unit_of(parameter: str | None, layers: str, embedding: str) -> str:
    if parameter is None:
        return CARRIED
    if layers and parameter.startswith(f"{layers}."):
        index = parameter[len(layers) + 1 :].partition(".")[0]
        return f"{layers}.{index}"
    return "embedding" if embedding and parameter.startswith(f"{embedding}.") else "rest"
