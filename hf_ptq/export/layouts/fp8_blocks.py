"""Hugging Face's block-FP8 layout (that of DeepSeek-V3): one format, E4M3 with a scale for 128 x 128 weights.

    weight E4M3 [out, in];  weight_scale_inv fp32 [ceil(out / 128), ceil(in / 128)], which, despite its name, is
    multiplied with: value = code * weight_scale_inv

The last block of rows may be cut off. vLLM and SGLang take that of a linear by itself, and of the last one that they
merge into a module, but raise at others (their validate_fp8_block_shape), and at experts. Servers quantize
activations at run time, by token and 128 inputs, whether a recipe says so or not. `modules_to_not_convert` are exact
names; transformers also takes a name for the beginning of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hf_ptq.errors import Problem
from hf_ptq.export.layouts.compressed_tensors import CODES, SQUARE_SCALE
from hf_ptq.export.layouts.layout import ConfigFiles, Contents, Layout, Scheme, Storage, by_fields
from hf_ptq.export.servers import served_modules

SCHEME: Scheme = ("fp8_2d", None)
BLOCK = [128, 128]
CAST = ("fp8_cast", "fp8_cast")


def _storage(scheme: Scheme) -> Storage | None:
    scale = replace(SQUARE_SCALE, name="weight_scale_inv")
    return by_fields(scheme[0], (CODES, scale)) if scheme == SCHEME else None


def _kv_problem(kv: tuple[str, str]) -> str | None:
    return None if kv == CAST else "a calibrated KV cache: its configuration has no word for one"


def _describe(contents: Contents) -> ConfigFiles:
    block = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": sorted(contents.unquantized),
    }
    return ConfigFiles(block, None)


def _problems(contents: Contents) -> Iterator[Problem]:
    """Unquantized modules that transformers would take for the beginning of a quantized one."""
    unquantized = frozenset(contents.unquantized)
    for module in contents.schemes:
        beginnings = (module[:end] for end in range(1, len(module) + 1))
        if (found := next((part for part in beginnings if part in unquantized), None)) is not None:
            what = f"{found} stays unquantized, and transformers then leaves {module} out as well"
            yield Problem(what, "quantize both or neither, or take --export_fmt compressed-tensors")


def _cut_blocks(contents: Contents) -> Iterator[str]:
    """Linears whose last block of rows is no whole one, where vLLM and SGLang put others behind it.

    Of a merged module the last linear may end within a block; the projections of experts may not.
    """
    found: dict[tuple[str, int], list[str]] = {}
    for module in served_modules(contents.shapes):
        for name in module.linears if module.is_experts else module.linears[:-1]:
            rows = contents.shapes[name][0]
            if rows % BLOCK[0]:
                found.setdefault((module.name.rpartition(".")[2], rows), []).append(name)
    for (_, rows), names in found.items():
        yield (
            f"{names[0]}{' ...' if len(names) > 1 else ''} has {rows} outputs, which are no whole number of blocks of "
            "128 x 128: vLLM and SGLang merge it with others and refuse to load it; leave such linears out by a rule "
            "(enable: false)"
        )


def _warnings(contents: Contents) -> Iterator[str]:
    yield from _cut_blocks(contents)
    yield "servers of this layout quantize activations too, by token and 128 inputs, at run time"
    if contents.kv == CAST:
        yield "this layout cannot say that the KV cache is FP8: ask the server for it (--kv-cache-dtype fp8)"


def _disagreements(config: Mapping[str, Any], _: Mapping[str, Any], contents: Contents) -> Iterator[str]:
    block = config.get("quantization_config") or {}
    if set(block.get("modules_to_not_convert") or ()) != set(contents.unquantized):
        yield "config.json: modules_to_not_convert are not the unquantized linears"
    if (block.get("quant_method"), block.get("weight_block_size")) != ("fp8", BLOCK):
        yield "config.json: quant_method and weight_block_size are not those of block-FP8"


LAYOUT = Layout(
    name="fp8",
    title="Hugging Face's block-FP8, weight_scale_inv",
    storage=_storage,
    kv_problem=_kv_problem,
    kv_names=None,
    describe=_describe,
    problems=_problems,
    warnings=_warnings,
    disagreements=_disagreements,
)
