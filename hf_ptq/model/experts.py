"""Routed experts, stacked in memory, run by a function of ours that lets quantizers see every row.

transformers looks up the forward of its experts modules by name (`ALL_EXPERTS_FUNCTIONS`); registering ours under a
name of its own reaches every family that takes the registry, replaces no class and no forward, and so keeps the
dispatch of expert parallelism, which ends in the same look-up. And as the name is not "grouped_mm", `generate` does
not switch the decode to an implementation that knows no quantizers.

The arithmetic is that of a mixture of experts, over rows sorted by expert:

    rows = hidden[token of each (token, choice)];  h = gate(rows @ W_gate_up[e]^T);  y = h @ W_down[e]^T
    out[token] = sum over choices of weight * y

`input_quantizer` and `down_input_quantizer`, submodules of the experts module, are given the rows of both products
and the expert of each row. There is no loop over experts and no host synchronisation, except with the loop kernel.
Under expert parallelism (`model/exchange.py`) `num_experts` is the local number and the rows are tokens of all ranks,
with choices that are experts here and choices that are not. A rank that has run out of data goes on in step with the
others and sends no row (`no_tokens`).

It does not know what the quantizers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from hf_ptq.quantization.formats import SMALLEST_FUSED, kernels_run_on

INPUT_QUANTIZER = "input_quantizer"
DOWN_INPUT_QUANTIZER = "down_input_quantizer"
# What the decorator of transformers sets on every experts module that takes the registry.
_REGISTRY_ATTRIBUTES = frozenset(
    {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel"}
)
ALIGNMENT_BYTES = 16  # strides that the grouped kernel takes are multiples of this


class RowQuantizer(Protocol):
    """Sees the rows of a grouped product with the expert of each; gives what is multiplied."""

    def quantize_rows(self, values: torch.Tensor, source: torch.Tensor | None, experts: torch.Tensor) -> torch.Tensor:
        """The rows [rows, inputs]: `values` themselves, or `values[source]` (int64 [rows]). `experts`: int64 [rows]."""
        ...


GroupedLinear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def takes_registry(module: nn.Module) -> bool:
    """True for an experts module whose forward is looked up by name."""
    return vars(module).keys() >= _REGISTRY_ATTRIBUTES


def use_our_experts(model: PreTrainedModel, implementation: str) -> None:
    """Let every experts module of `model` run `experts_forward` with that kernel (a name of `KERNELS`)."""
    if any(takes_registry(module) for module in model.modules()):
        model.set_experts_implementation(_registered_name(implementation))


@contextmanager
def no_tokens(model: nn.Module) -> Iterator[None]:
    """Inside the block every experts module is given none of this rank's rows, and adds zeros to them."""
    shapes: dict[nn.Module, torch.Size] = {}

    def empty(module: nn.Module, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        shapes[module] = arguments[0].shape
        return tuple(argument[:0] for argument in arguments)

    def zeros(module: nn.Module, _arguments: object, output: torch.Tensor) -> torch.Tensor:
        return output.new_zeros(shapes.pop(module))

    experts = [module for module in model.modules() if takes_registry(module)]
    handles = [module.register_forward_pre_hook(empty) for module in experts]
    handles += [module.register_forward_hook(zeros) for module in experts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kernel_of(module: Any) -> GroupedLinear:
    """The kernel that an experts module was given by `use_our_experts`."""
    name = module.config._experts_implementation
    assert name in KERNEL_OF, f"the experts run {name!r}, which knows no quantizers"
    return KERNEL_OF[name]


def _registered_name(implementation: str) -> str:
    return f"hf_ptq_{implementation}"


# --- the two kernels ---------------------------------------------------------------------------


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """One grouped matrix product: rows [rows, in] sorted by expert, weight [experts, in, out], ends int32 [experts].

    Sizes that the kernel cannot take go through the loop.
    """
    if any(size * weight.element_size() % ALIGNMENT_BYTES for size in weight.shape[1:]):
        return looped_linear(rows, weight, ends, bias)
    out = torch.nn.functional.grouped_mm(rows, weight, offs=ends)
    return out if bias is None else out.add_(bias)


def looped_linear(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same by one product per expert; synchronises with the host once."""
    out = rows.new_zeros(rows.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(rows[start:end], weight[expert], out=out[start:end])
        start = end
    return out if bias is None else out.add_(bias)


KERNELS: dict[str, GroupedLinear] = {"grouped_mm": grouped_linear, "eager": looped_linear}
KERNEL_OF = {_registered_name(implementation): kernel for implementation, kernel in KERNELS.items()}


# --- the forward ---------------------------------------------------------------------------------


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    kernel: GroupedLinear,
) -> torch.Tensor:
    """What the experts of one layer add: hidden_states [tokens, hidden], choices and weights [tokens, k]."""
    out, places = choice_outputs(module, hidden_states, top_k_index, kernel)
    return weighted_sum(out, places, top_k_weights, hidden_states.dtype)


def choice_outputs(
    module: Any, hidden_states: torch.Tensor, index: torch.Tensor, kernel: GroupedLinear, num_live: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The unweighted output of every choice, [choices, hidden], by expert, and where each choice's is, int64 [choices].

    The choices are those of `index` [tokens, k], row by row. Ids of `module.num_experts` are no experts here and have
    no output; `num_live` choices are left, all if None.
    """
    k, flat = index.shape[1], index.reshape(-1)
    experts, order = torch.sort(flat, stable=True)
    if num_live is not None:
        experts, order = experts[:num_live].long(), order[:num_live]
    source = order // k
    ids = torch.arange(module.num_experts, device=experts.device)
    ends = torch.searchsorted(experts, ids, right=True, out_int32=True)

    first = "gate_up_proj" if module.has_gate else "up_proj"
    rows = _quantized(module, INPUT_QUANTIZER, hidden_states, source, experts)
    inner = _product(module, first, rows, ends, experts, kernel)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    inner = _quantized(module, DOWN_INPUT_QUANTIZER, inner, None, experts)
    out = _product(module, "down_proj", inner, ends, experts, kernel)
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)

    # The inverse of the sort, in which only those that are left have a place.
    choice = order if num_live is None else ((flat < module.num_experts).cumsum(0) - 1)[order]
    return out, torch.empty_like(order).scatter_(0, choice, torch.arange(len(order), device=order.device))


def weighted_sum(
    outputs: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """What experts add, [tokens, hidden] of `dtype`: each token's rows of `outputs` by its weights [tokens, k].

    `places`: int64 [tokens * k]. Summing by reshape is deterministic, index_add is not. (kernels.py does the same.)
    """
    needs_torch = torch.is_grad_enabled() and (outputs.requires_grad or weights.requires_grad)
    needs_torch |= torch.compiler.is_compiling()  # which makes kernels of its own
    if outputs.numel() >= SMALLEST_FUSED and not needs_torch and kernels_run_on(outputs.device):
        from hf_ptq.model import kernels

        return kernels.weighted_sum(outputs, places, weights.contiguous(), dtype)
    out, weights = outputs.index_select(0, places).view(*weights.shape, outputs.shape[1]), weights[..., None]
    out = out.mul_(weights) if out.dtype == weights.dtype else out * weights
    return out.sum(1).to(dtype)


def _quantized(
    module: nn.Module, name: str, values: torch.Tensor, source: torch.Tensor | None, experts: torch.Tensor
) -> torch.Tensor:
    quantizer: RowQuantizer | None = module._modules.get(name)  # type: ignore[assignment]
    if quantizer is None:
        return values if source is None else values.index_select(0, source)
    return quantizer.quantize_rows(values, source, experts)


def _product(
    module: Any, name: str, rows: torch.Tensor, ends: torch.Tensor, owner: torch.Tensor, kernel: GroupedLinear
) -> torch.Tensor:
    weight = getattr(module, name)
    weight = weight if module.is_transposed else weight.transpose(-2, -1)
    bias = getattr(module, f"{name}_bias")[owner] if module.has_bias else None
    return kernel(rows.to(weight.dtype), weight, ends, bias)


for _name, _kernel in KERNEL_OF.items():
    ALL_EXPERTS_FUNCTIONS.register(_name, partial(experts_forward, kernel=_kernel))
