"""The modelopt layout: what a pair of number formats is called there, and what its configuration has to exclude.

Servers know a linear by one `quant_algo`, which stands for a weight format and an input format together. A pair that
has no name cannot be exported in this layout.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel

from hf_ptq.checkpoint.names import Placement
from hf_ptq.checkpoint.source import Source
from hf_ptq.export.config_files import LayerAlgo
from hf_ptq.model.views import WEIGHT
from hf_ptq.quantization.assignment import Assignment

# (weight format, input format) -> the layout's name (reference: Model Optimizer's and vLLM's quant_algo strings)
ALGOS: dict[tuple[str, str | None], LayerAlgo] = {
    ("fp8", "fp8"): LayerAlgo("FP8", None, 8, 8, "float"),
    ("fp8_per_channel", "fp8_per_token"): LayerAlgo("FP8_PER_CHANNEL_PER_TOKEN", None, 8, 8, "float"),
    ("nvfp4", "nvfp4"): LayerAlgo("NVFP4", 16, 4, 4, "float"),
    ("nvfp4", None): LayerAlgo("W4A16_NVFP4", 16, 4, None, "float"),
    ("int8_per_channel", None): LayerAlgo("W8A16", None, 8, None, "int"),
}
KV_ALGOS: dict[tuple[str, str], str] = {
    ("fp8", "fp8"): "FP8",
    ("fp8_cast", "fp8_cast"): "FP8",
    ("nvfp4", "nvfp4"): "NVFP4",
    ("nvfp4_cast", "nvfp4_cast"): "NVFP4",
}
NO_LINEAR = ("embed", "norm", "conv")  # in the names of carried-over matrices that no server builds a linear for


def _holds_all_experts(name: str, source: Source) -> bool:
    """True for a tensor with the weights of all experts of a layer, which stays as it is; servers know the experts."""
    return len(source.tensors[name].shape) == 3 and name.rpartition(".")[0].endswith(".experts")


def unquantized_linears(
    source: Source, model: PreTrainedModel, placements: Mapping[str, Placement], assignment: Assignment
) -> list[str]:
    """Source modules that servers build as linears and that are not quantized, in the source's order.

    An output head that shares the embedding's weight is among them, though no tensor bears its name.
    """
    quantized = assignment.by_module
    modules = dict(model.named_modules())
    found = []
    for name, placement in placements.items():
        if _holds_all_experts(name, source):
            found.append(name.rpartition(".")[0])
            continue
        module = name.removesuffix(WEIGHT)
        if not name.endswith(WEIGHT) or len(source.tensors[name].shape) != 2 or module in quantized:
            continue
        owner = modules.get((placement.parameter or "").rpartition(".")[0]) if placement.parameter else None
        if isinstance(owner, nn.Embedding) or (owner is None and any(word in module for word in NO_LINEAR)):
            continue
        found.append(module)
    head = next((name for name, module in modules.items() if module is model.get_output_embeddings()), None)
    if head and head not in found and head not in quantized:
        found.append(head)
    return list(dict.fromkeys(found))
