"""What is known of single model families, by the class of the module that it is about; everything else asks here.

Experts that the hub keeps in one tensor a layer: which projections lie behind one another in its rows, and under which
names servers look for them when they are quantized. (vLLM, SGLang and TensorRT-LLM read those of Qwen3-VL-MoE one by
one; of GPT-OSS, whose gate and up rows alternate, nobody does, and Model Optimizer writes them as they are.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FusedExperts:
    """Experts that are one tensor on the hub.

    `projections`: leaf of the parameter -> the projections that its rows (outputs) hold, of equal height.
    `stays_fused`: quantized, they are one tensor again.
    """

    projections: Mapping[str, tuple[str, ...]]
    stays_fused: bool


FUSED_EXPERTS: dict[str, FusedExperts] = {
    "Qwen3VLMoeTextExperts": FusedExperts(
        {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}, stays_fused=False
    ),
    "GptOssExperts": FusedExperts({"gate_up_proj": ("gate_up_proj",), "down_proj": ("down_proj",)}, stays_fused=True),
}
