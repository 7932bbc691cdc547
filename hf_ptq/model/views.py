"""Weight views: where each linear weight of the source lies in the parameters of the model.

Most lie there as they are. Routed experts of one layer are stacked in memory: gate and up projections of all experts
in one parameter [experts, gate rows + up rows, inputs], down projections in another. A view names the source's
modules and the rows of the parameter that hold them, so that a stacked parameter is quantized in one call over all
experts and written under the names of the source, without undoing the loader's conversion tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_ptq.checkpoint.names import Placement
from hf_ptq.checkpoint.source import TensorEntry

WEIGHT = ".weight"


@dataclass(frozen=True)
class WeightView:
    """One linear weight [out, in], or the same projection of all experts of a layer [experts, out, in].

    `modules`: names of the source's modules (tensor names without `.weight`), one per expert. `start_row`: the first
    row of the parameter's second-to-last dimension that belongs to this view. `sources`: the source's tensors that
    hold the weights where that is not one `.weight` for each module.
    """

    modules: tuple[str, ...]
    parameter: str
    shape: tuple[int, int]
    start_row: int = 0
    is_stacked: bool = False
    sources: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The source's tensors that hold the weights of this view, perhaps beside those of another."""
        return self.sources or tuple(module + WEIGHT for module in self.modules)

    @property
    def owner(self) -> str:
        """The model's module that holds the parameter."""
        return self.parameter.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """The projection's own name: q_proj, w1, gate_proj."""
        return self.modules[0].rpartition(".")[2]

    @property
    def stack(self) -> str:
        """The source's name of all experts of the layer: what stands before the expert's number."""
        return self.modules[0].rsplit(".", 2)[0]

    @property
    def num_elements(self) -> int:
        """Elements of the weights of all modules together."""
        return len(self.modules) * self.shape[0] * self.shape[1]

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The view's rows of its parameter; shares memory."""
        return parameter.narrow(-2, self.start_row, self.shape[0])


def weight_views(
    placements: Mapping[str, Placement],
    tensors: Mapping[str, TensorEntry],
    stacking: Mapping[str, tuple[str, ...]],
) -> tuple[WeightView, ...]:
    """The views of every 2-D `.weight` of the source that lies in a parameter whole, in the source's order.

    `stacking`: source pattern -> the patterns that are joined along the rows with it, in order, for converters that
    only stack experts. Weights behind any other converter have no view; they cannot be quantized.
    """
    plain: list[WeightView] = []
    stacks: dict[tuple[str, str], list[str]] = {}
    for name, placement in placements.items():
        if placement.parameter is None or not name.endswith(WEIGHT) or len(tensors[name].shape) != 2:
            continue
        if placement.pattern is None:
            out_features, in_features = tensors[name].shape
            plain.append(WeightView((name.removesuffix(WEIGHT),), placement.parameter, (out_features, in_features)))
        elif placement.pattern in stacking:
            stacks.setdefault((placement.parameter, placement.pattern), []).append(name)
    return (*plain, *_stacked_views(stacks, tensors, stacking))


def _stacked_views(
    stacks: Mapping[tuple[str, str], list[str]],
    tensors: Mapping[str, TensorEntry],
    stacking: Mapping[str, tuple[str, ...]],
) -> list[WeightView]:
    views = []
    for (parameter, pattern), names in stacks.items():
        start = 0
        for earlier in stacking[pattern]:
            if earlier == pattern:
                break
            start += tensors[stacks[parameter, earlier][0]].shape[0]
        modules = tuple(name.removesuffix(WEIGHT) for name in names)
        out_features, in_features = tensors[names[0]].shape
        views.append(WeightView(modules, parameter, (out_features, in_features), start, is_stacked=True))
    return views
