"""What is quantized in a model, told in lines."""

from __future__ import annotations

import torch
from torch import nn

from hf_ptq.model.wrappers import named
from hf_ptq.quantization.modules import kind_of
from hf_ptq.quantization.quantizer import Quantizer


def summarize(model: nn.Module, verbose: bool) -> str:
    """A line for each kind of module and choice of formats, with their number; or a line for each module."""
    rows: dict[str, tuple[str, str]] = {}
    for name, module in named(model).items():
        own = {leaf: child for leaf, child in module._modules.items() if isinstance(child, Quantizer)}
        if own:
            kind = kind_of(module)
            told = {_tensor(leaf, quantizer, verbose) for leaf, quantizer in own.items()}
            rows[name] = (kind.name if kind else type(module).__name__), ", ".join(sorted(told))
    if verbose:
        return "\n".join(f"{name} ({kind}): {told}" for name, (kind, told) in rows.items())
    counts: dict[tuple[str, str], int] = {}
    for row in rows.values():
        counts[row] = counts.get(row, 0) + 1
    return "\n".join(f"{count} {kind}: {told}" for (kind, told), count in sorted(counts.items())) or "not quantized"


def _tensor(leaf: str, quantizer: Quantizer, verbose: bool) -> str:
    told = f"{quantizer.slot.leaf or leaf.removesuffix('_quantizer')} {quantizer.format.name}"
    if not quantizer.is_enabled:
        told += " (off)"
    if not verbose or quantizer.amax is None:
        return told
    amax: torch.Tensor = quantizer.amax.detach()
    low, high = float(amax.min()), float(amax.max())
    return f"{told} amax {high:.4g}" if amax.numel() == 1 else f"{told} amax {low:.4g} to {high:.4g}"
