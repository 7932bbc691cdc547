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
from hf_ptq.model.units import Unit
from hf_ptq.model.views import WEIGHT, WeightView


def refuse_nonfinite(
    unit: Unit, model: nn.Module, placements: Mapping[str, Placement], views: Mapping[str, WeightView]
) -> None:
    """Raise RunError naming each source tensor of `unit` with NaN or infinity. `views`: source module -> its view."""
    loaded = {p: _loaded(model, p) for name in unit.tensors if (p := placements[name].parameter) is not None}
    checked = {p: tensor for p, tensor in loaded.items() if tensor.is_floating_point() and tensor.numel()}
    if not checked:
        return
    finite = torch.stack([_is_finite(tensor) for tensor in checked.values()]).tolist()
    bad = {parameter for parameter, ok in zip(checked, finite, strict=True) if not ok}
    damaged = [
        name
        for name in unit.tensors
        if (p := placements[name].parameter) in bad and not bool(_is_finite(_part(name, checked[p], views)))
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
    return tensor if tensor is not None else module.get_buffer(leaf)


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Bool scalar on the tensor's device."""
    return torch.stack(tensor.aminmax()).isfinite().all()


def _part(name: str, parameter: torch.Tensor, views: Mapping[str, WeightView]) -> torch.Tensor:
    """What a source tensor fills of its parameter."""
    module = name.removesuffix(WEIGHT)
    view = views.get(module)
    if view is None or not view.is_stacked:
        return parameter
    return view.of(parameter)[view.modules.index(module)]
