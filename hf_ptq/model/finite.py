"""Which tensors of a loaded unit hold NaN or infinity: weights that no format can hold, from a damaged source.

The smallest and the largest value of a tensor are finite if and only if all values are (NaN propagates), so one pass
without a temporary per parameter and one transfer per unit find out; only a damaged parameter is looked into further.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hf_ptq.checkpoint.names import Placement
from hf_ptq.errors import Problem, RunError
from hf_ptq.model.sharding import local_of
from hf_ptq.model.units import Unit
from hf_ptq.model.views import WEIGHT, WeightView


def refuse_nonfinite(
    unit: Unit,
    model: nn.Module,
    placements: Mapping[str, Placement],
    views: Mapping[str, WeightView],
    held: Mapping[str, range],
) -> None:
    """Raise RunError naming each source tensor of `unit` with NaN or infinity, as far as it is here.

    `views`: source module -> its view; `held`: parameter -> the part of its first dimension that is here, if not all.
    """
    loaded = {p: _loaded(model, p) for name in unit.tensors if (p := placements[name].parameter) is not None}
    checked = {p: tensor for p, tensor in loaded.items() if tensor.is_floating_point() and tensor.numel()}
    if not checked:
        return
    finite = torch.stack([_is_finite(tensor) for tensor in checked.values()]).tolist()
    bad = {parameter for parameter, ok in zip(checked, finite, strict=True) if not ok}
    damaged = [
        name
        for name in unit.tensors
        if (p := placements[name].parameter) in bad and _is_damaged(_part(name, checked[p], views, held.get(p)))
    ]
    if damaged:
        cure = (
            "the source is damaged, or holds numbers that the model's dtype cannot hold: download or convert it again"
        )
        raise RunError(*(Problem(f"{name} holds NaN or infinity", cure) for name in damaged))


def _loaded(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    tensor = module._parameters.get(leaf)
    return local_of(tensor) if tensor is not None else module.get_buffer(leaf)


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Bool scalar on the tensor's device."""
    return torch.stack(tensor.aminmax()).isfinite().all()


def _is_damaged(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not bool(_is_finite(tensor))


def _part(
    name: str, parameter: torch.Tensor, views: Mapping[str, WeightView], held: range | None
) -> torch.Tensor | None:
    """What a source tensor fills of its parameter; None where that is elsewhere."""
    module = name.removesuffix(WEIGHT)
    view = views.get(module)
    if view is None or not view.is_stacked:
        return parameter
    expert = view.modules.index(module)
    if held is None:
        return view.of(parameter)[expert]
    return view.of(parameter)[expert - held.start] if expert in held else None
