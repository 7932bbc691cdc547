"""Weight views: where each linear weight of the source lies in the parameters of the model.

Most lie there as they are. Routed experts of one layer are stacked in memory: gate and up projections of all experts
in one parameter [experts, gate rows + up rows, inputs], down projections in another; some families keep them so on the
hub, perhaps with rows and inputs exchanged. A view names the source's
modules and the rows of the parameter that hold them, so that a stacked parameter is quantized in one call over all
experts and written under the names of the source, without undoing the loader's conversion tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from hf_ptq.checkpoint.names import Placement
from hf_ptq.checkpoint.slices import LazyTensor
from hf_ptq.checkpoint.source import TensorEntry

WEIGHT = ".weight"


@dataclass(frozen=True)
class WeightView:
    """One linear weight [out, in], or the same projection of all experts of a layer [experts, out, in].

    `modules`: names of the source's modules (tensor names without `.weight`), one per expert. `start_row`: the first
    row of the parameter's second-to-last dimension that belongs to this view. `sources`: the source's tensors that
    hold the weights where that is not one `.weight` for each module, but all experts in one; `modules` are then the
    names that servers have for them. `is_transposed`, `source_is_transposed`: the parameter, or the source's tensor of
    all experts, is [experts, inputs, rows]. `joined`: the name
    under which the tensors of all experts are written as one, [experts, inputs, rows]; empty: each by itself.
    """

    modules: tuple[str, ...]
    parameter: str
    shape: tuple[int, int]
    start_row: int = 0
    is_stacked: bool = False
    sources: tuple[str, ...] = ()
    is_transposed: bool = False
    source_is_transposed: bool = False
    joined: str = ""

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
        return self._upright(parameter).narrow(-2, self.start_row, self.shape[0])

    def of_source(self, module: str, tensors: Callable[[str], LazyTensor]) -> torch.Tensor:
        """The weight [out, in] of one module as the source has it; `tensors`: source name -> tensor."""
        if not self.sources:
            return tensors(module + WEIGHT)[...]
        expert = self.modules.index(module)
        matrix = tensors(self.sources[0])[expert : expert + 1][0]
        upright = matrix.transpose(-2, -1) if self.source_is_transposed else matrix
        return upright.narrow(-2, self.start_row, self.shape[0])

    @property
    def is_apart(self) -> bool:
        """Whether the experts of a stack are written each by itself."""
        return self.is_stacked and not self.joined

    def _upright(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter.transpose(-2, -1) if self.is_transposed else parameter


@dataclass(frozen=True)
class FusedParameter:
    """A parameter that holds experts which are one tensor on the hub too; see model/families.py.

    `shape`: [experts, rows, inputs], whatever way round the parameter is.
    """

    projections: tuple[str, ...]
    shape: tuple[int, int, int]
    is_transposed: bool
    stays_fused: bool


def weight_views(
    placements: Mapping[str, Placement],
    tensors: Mapping[str, TensorEntry],
    stacking: Mapping[str, tuple[str, ...]],
    fused: Mapping[str, FusedParameter] | None = None,
) -> tuple[WeightView, ...]:
    """The views of every 2-D `.weight` of the source that lies in a parameter whole, in the source's order.

    `stacking`: source pattern -> the patterns that are joined along the rows with it, in order, for converters that
    only stack experts. `fused`: parameter -> the experts in it that are one tensor of the source. Weights behind any
    other converter have no view; they cannot be quantized.
    """
    plain: list[WeightView] = []
    fused = fused or {}
    stacks: dict[tuple[str, str], list[str]] = {}
    for name, placement in placements.items():
        together = fused.get(placement.parameter or "")
        if together is not None and placement.parameter and len(tensors[name].shape) == 3:
            plain += _fused_views(tensors[name], placement.parameter, together)
            continue
        if placement.parameter is None or not name.endswith(WEIGHT) or len(tensors[name].shape) != 2:
            continue
        if placement.pattern is None:
            out_features, in_features = tensors[name].shape
            plain.append(WeightView((name.removesuffix(WEIGHT),), placement.parameter, (out_features, in_features)))
        elif placement.pattern in stacking:
            stacks.setdefault((placement.parameter, placement.pattern), []).append(name)
    return (*plain, *_stacked_views(stacks, tensors, stacking))


def _fused_views(source: TensorEntry, parameter: str, fused: FusedParameter) -> Iterator[WeightView]:
    """One view for each projection in a tensor of all experts."""
    stack = source.name.rpartition(".")[0]
    experts, rows, inputs = fused.shape
    height = rows // len(fused.projections)
    for number, leaf in enumerate(fused.projections):
        yield WeightView(
            modules=tuple(f"{stack}.{expert}.{leaf}" for expert in range(experts)),
            parameter=parameter,
            shape=(height, inputs),
            start_row=number * height,
            is_stacked=True,
            sources=(source.name,),
            is_transposed=fused.is_transposed,
            source_is_transposed=fused.is_transposed or source.shape[1:] != (rows, inputs),
            joined=source.name if fused.stays_fused else "",
        )


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
