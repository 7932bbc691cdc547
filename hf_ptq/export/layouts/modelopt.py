"""The modelopt layout: the codec's tensors as they are, two configuration files that say the same.

Names of algorithms are in export/layout.py, the files in export/config_files.py, the rules by which servers read their
exclude lists in export/servers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hf_ptq.errors import Problem
from hf_ptq.export.config_files import MIXED, disagreements, quantization_config
from hf_ptq.export.layout import ALGOS, KV_ALGOS, NO_SERVER_READS, served_name
from hf_ptq.export.layouts.layout import ConfigFiles, Contents, InputTensor, Layout, Scheme, Storage, as_encoded
from hf_ptq.export.servers import (
    EXPERT,
    SGLANG_BY_LEAF,
    WITHOUT_NVFP4,
    exclude_entries,
    exclusion_problems,
    support_warnings,
)
from hf_ptq.quantization.formats.codec import Codec

CURE = "change the recipe so that what servers fuse, and the experts of a layer, are quantized together"
MAX_NAMED = 10


def _input_scale(codec: Codec, amax: torch.Tensor) -> torch.Tensor:
    scale = codec.input_scale(amax)
    assert scale is not None
    return scale


INPUT_SCALE = InputTensor("input_scale", (), _input_scale)


def _storage(scheme: Scheme) -> Storage | None:
    return as_encoded(scheme[0], INPUT_SCALE) if scheme in ALGOS else None


def _kv_problem(kv: tuple[str, str]) -> str | None:
    unread = [NO_SERVER_READS[name] for name in kv if name in NO_SERVER_READS]
    if unread:
        return f"keys in {kv[0]}: no server reads {unread[0]}, which they need"
    return None if kv in KV_ALGOS else f"keys in {kv[0]} with values in {kv[1]}: no server has a name for that"


def _kv_names(layer: str) -> tuple[str, str]:
    return f"{layer}.k_proj.k_scale", f"{layer}.v_proj.v_scale"


def _describe(contents: Contents) -> ConfigFiles:
    layers = {module: ALGOS[scheme] for module, scheme in contents.schemes.items()}
    kv = KV_ALGOS[contents.kv] if contents.kv else None
    if _mixes_latent_attention(contents):
        return ConfigFiles(*quantization_config(layers, (), kv, with_table=True))
    return ConfigFiles(*quantization_config(layers, exclude_entries(list(layers), contents.unquantized), kv))


def _mixes_latent_attention(contents: Contents) -> bool:
    """True where some layers' low-rank projections are quantized and others' are not.

    SGLang knows an excluded one by its last name, so that one entry would speak for all layers: such an export has a
    table of what is quantized, and excludes nothing.
    """
    quantized, left = ({m.rpartition(".")[2] for m in part} for part in (contents.schemes, contents.unquantized))
    return bool(quantized & left & SGLANG_BY_LEAF)


def _problems(contents: Contents) -> Iterator[Problem]:
    _, nested = _describe(contents)
    assert nested is not None
    block = nested["quantization"]
    excluded, is_mixed = block.get("exclude_modules", ()), block["quant_algo"] == MIXED
    for problem in exclusion_problems(contents.schemes, contents.unquantized, excluded, is_mixed):
        yield Problem(problem, CURE)


def _warnings(contents: Contents) -> list[str]:
    algos = {module: served_name(ALGOS[scheme]) for module, scheme in contents.schemes.items()}
    of_experts = {algo for module, algo in algos.items() if EXPERT.fullmatch(module)}
    found = support_warnings(set(algos.values()), of_experts)
    if contents.joined:
        found.append(
            f"the experts of a layer are one tensor, as on the hub ({contents.joined[0]}): Model Optimizer's names for "
            "them are known to TensorRT-LLM, not to vLLM and SGLang"
        )
    if (
        _mixes_latent_attention(contents)
        and len(set(algos.values())) == 1
        and not any("NVFP4" in algo for algo in algos.values())
    ):
        found.append(WITHOUT_NVFP4)
    return found


def _disagreements(config: Mapping[str, Any], nested: Mapping[str, Any], contents: Contents) -> Iterator[str]:
    """Both files agree, list every layer where they list any, and are read rightly by every server."""
    yield from disagreements(config, nested)
    block = config.get("quantization_config") or {}
    is_mixed = block.get("quant_algo") == MIXED
    listed, quantized = set(block.get("quantized_layers") or {}), set(contents.schemes)
    if is_mixed and listed != quantized:
        shown = ", ".join(sorted(quantized ^ listed)[:MAX_NAMED])
        yield f"config.json: quantized_layers and the quantized layers differ in {shown}"
    yield from exclusion_problems(quantized, contents.unquantized, block.get("ignore") or (), is_mixed)


LAYOUT = Layout(
    name="modelopt",
    title="NVIDIA Model Optimizer's; vLLM, SGLang and TensorRT-LLM",
    storage=_storage,
    kv_problem=_kv_problem,
    kv_names=_kv_names,
    describe=_describe,
    problems=_problems,
    warnings=_warnings,
    disagreements=_disagreements,
    joins_experts=True,
)
