"""A plain checkpoint whose weights carry the quantization error; the quantizers' state lies in a folder beside them.

    weight = decode(encode(weight)), in the source's dtype and under its name; no quantization_config

Every loader takes it for an unquantized model, so it shows what a recipe costs where no server knows the format, and
every format can be written. Activations are not rounded by whoever loads it, unless he reads `quantizer_state/`:
safetensors with the ranges (`weight_quantizer.amax`, `input_quantizer.amax`, `k_quantizer.amax`, `v_quantizer.amax`
behind the module's name, fp32) and quantizer_state.json with the formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hf_ptq.export.layouts.layout import ConfigFiles, Contents, InputTensor, Layout, Scheme, Shape, Storage
from hf_ptq.quantization.formats import codecs
from hf_ptq.quantization.formats.codec import Codec, Tensors
from hf_ptq.quantization.formats.codec import Layout as StoredShapes

STATE_FOLDER = "quantizer_state"
STATE_FILE = "quantizer_state.json"
RANGE = "weight_quantizer.amax"


def _amax(_: Codec, amax: torch.Tensor) -> torch.Tensor:
    return amax.float()


def _storage(scheme: Scheme) -> Storage | None:
    codec = codecs()[scheme[0]]

    def layout(shape: Shape, dtype: torch.dtype) -> StoredShapes:
        return {"weight": (dtype, shape)}

    def store(encoded: Tensors, _shape: Shape, dtype: torch.dtype) -> Tensors:
        return {"weight": codec.decode(encoded).to(dtype)}

    return Storage(
        layout=layout,
        store=store,
        decode=lambda stored: stored["weight"].float(),
        input=InputTensor("input_quantizer.amax", (), _amax, is_scale=False),
        rounds_to_source=True,
    )


def _kv_names(layer: str) -> tuple[str, str]:
    return f"{layer}.k_quantizer.amax", f"{layer}.v_quantizer.amax"


def state_json(contents: Contents) -> dict[str, Any]:
    """quantizer_state.json: the formats of every quantized module and of the cache."""
    modules = {
        module: {"weight": weight, "input": inputs} for module, (weight, inputs) in sorted(contents.schemes.items())
    }
    cache = {"k": contents.kv[0], "v": contents.kv[1], "layers": list(contents.kv_layers)} if contents.kv else None
    return {"modules": modules, "kv_cache": cache}


def _disagreements(config: Mapping[str, Any], *_: object) -> Iterator[str]:
    if "quantization_config" in config:
        yield "config.json: a quantization_config in a checkpoint that is to be loaded as an unquantized one"


def _warnings(contents: Contents) -> Iterator[str]:
    if any(inputs for _, inputs in contents.schemes.values()):
        yield "what loads this checkpoint rounds no activations, unless it reads quantizer_state/"


LAYOUT = Layout(
    name="fakequant",
    title="plain weights with the quantization error in them, for every server and format",
    storage=_storage,
    kv_problem=lambda _: None,
    kv_names=_kv_names,
    describe=lambda _: ConfigFiles(None, None),
    problems=lambda _: (),
    warnings=_warnings,
    disagreements=_disagreements,
    joins_experts=True,
    keeps_ranges=True,
)
