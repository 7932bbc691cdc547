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
from hf_ptq.export.servers import ALGO_SUPPORT
from hf_ptq.model.views import WEIGHT
from hf_ptq.quantization.assignment import Assignment

# (weight format, input format) -> the layout's name (reference: Model Optimizer's and vLLM's quant_algo strings)
# INT4 without AWQ is not called by AWQ's name: its readers look for a pre_quant_scale. FP8_PB_WO is in lower case as
# TensorRT-LLM spells it; vLLM compares in upper case.
ALGOS: dict[tuple[str, str | None], LayerAlgo] = {
    ("fp8", "fp8"): LayerAlgo("FP8", None, 8, 8, "float"),
    ("fp8_per_channel", "fp8_per_token"): LayerAlgo("FP8_PER_CHANNEL_PER_TOKEN", None, 8, 8, "float"),
    ("fp8_2d", None): LayerAlgo("fp8_pb_wo", 128, 8, None, "float", (128, 128)),
    ("int8_per_channel", "int8"): LayerAlgo("W8A8_SQ_PER_CHANNEL", None, 8, 8, "int"),
    ("int8_per_channel", None): LayerAlgo("W8A16", None, 8, None, "int"),
    **{(f"int4_block{size}", None): LayerAlgo("W4A16", size, 4, None, "int") for size in (32, 64, 128)},
    ("int4_block128_fp8", "fp8"): LayerAlgo("W4A8", 128, 4, 8, "int"),
    **{
        (weight, inputs): LayerAlgo("NVFP4" if inputs else "W4A16_NVFP4", 16, 4, 4 if inputs else None, "float")
        for weight in ("nvfp4", "nvfp4_static", "nvfp4_four_over_six")
        for inputs in ("nvfp4", None)
    },
    ("nvfp4_block32", None): LayerAlgo("W4A16_NVFP4", 32, 4, None, "float"),
    ("nvfp4_block32_fp8", "fp8"): LayerAlgo("W4A8_NVFP4_FP8", 32, 4, 8, "float"),
    ("mxfp4", "mxfp4"): LayerAlgo("MXFP4", 32, 4, 4, "float"),
    ("mxfp4", None): LayerAlgo("W4A16_MXFP4", 32, 4, None, "float"),
    ("mxfp4", "fp8"): LayerAlgo("W4A8_MXFP4_FP8", 32, 4, 8, "float"),
    ("mxfp6", "mxfp6"): LayerAlgo("MXFP6", 32, 6, 6, "float"),
    ("mxfp8", "mxfp8"): LayerAlgo("MXFP8", 32, 8, 8, "float"),
    ("mxint8", "mxint8"): LayerAlgo("MXINT8", 32, 8, 8, "int"),
}
KV_ALGOS: dict[tuple[str, str], str] = {
    ("fp8", "fp8"): "FP8",
    ("fp8_cast", "fp8_cast"): "FP8",
    ("nvfp4", "nvfp4"): "NVFP4",
    ("nvfp4_cast", "nvfp4_cast"): "NVFP4",
}
# Why no server can read the cache in these: there is no place for what they need beside a scale.
NO_SERVER_READS = {
    "fp8_affine": "the mean of each channel",
    "nvfp4_affine": "the mean of each channel",
    "nvfp4_rotate": "the rotation of queries and keys",
}
NO_LINEAR = ("embed", "norm", "conv")  # in the names of carried-over matrices that no server builds a linear for


def served_name(algo: LayerAlgo) -> str:
    """What `servers.ALGO_SUPPORT` knows an algo by: its name, with the group size where that decides."""
    grouped = f"{algo.algo} in groups of {algo.group_size}"
    return grouped if grouped in ALGO_SUPPORT else algo.algo


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
        if name in assignment.by_tensor:
            continue
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
