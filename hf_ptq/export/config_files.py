"""The two files that say how a checkpoint is quantized: config.json's `quantization_config` and hf_quant_config.json.

Why two: vLLM and SGLang read the first (flat keys, `ignore`, `kv_cache_scheme`), TensorRT-LLM the second (nested
under `quantization`, `exclude_modules`, `kv_cache_quant_algo`), and each believes only one of them, so both are made
here from the same values and `disagreements` compares what they say. The layout is ModelOpt's: loaders recognise it
by `quant_method` and by the nested file's producer name, which therefore is not ours; ours is in config.json.

One algorithm for all layers is named at the top; several make MIXED_PRECISION with a table of layers. `config_groups`
describes the number formats for the algorithms whose readers look at it (FP8, NVFP4, W4A16_NVFP4): vLLM takes NVFP4
whose groups have no input activations for W4A16_NVFP4. No reader looks for groups of the other algorithms, and the
reference implementation writes none, so there are none. Group sizes stand at the top level, where TensorRT-LLM looks.

Everything but `write_json` is a pure function of its arguments; nothing is re-serialised by a model class.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from hf_ptq.errors import RunError

NESTED_NAME = "hf_quant_config.json"
MIXED = "MIXED_PRECISION"
WITH_GROUPS = ("FP8", "NVFP4", "W4A16_NVFP4")
FP8_KV_SCHEME: dict[str, Any] = {"dynamic": False, "num_bits": 8, "type": "float"}  # vLLM wants all three, exactly
LAYOUT_VERSION = "0.47.0"  # the ModelOpt release whose files these are like


@dataclass(frozen=True)
class LayerAlgo:
    """How one linear is quantized, in the words of the config files.

    `algo` is a quant_algo name, `group_size` the inputs that share a scale (None: a channel or the tensor),
    `input_bits` None for weight-only formats, `block` (rows, inputs) where rows share a scale too.
    """

    algo: str
    group_size: int | None
    weight_bits: int
    input_bits: int | None
    kind: Literal["float", "int"]
    block: tuple[int, int] | None = None

    def entry(self) -> dict[str, Any]:
        """The algorithm as hf_quant_config.json writes it, for all layers or for one."""
        size = {} if self.group_size is None else {"group_size": self.group_size}
        return {"quant_algo": self.algo} | size | ({} if self.block is None else {"weight_block_size": [*self.block]})

    def group(self, targets: Sequence[str]) -> dict[str, Any]:
        """The member of `config_groups` for layers of this kind."""
        sizes = {} if self.group_size is None else {"group_size": self.group_size}
        inputs = {"dynamic": False, "num_bits": self.input_bits, "type": self.kind} | sizes
        weights = {"dynamic": False, "num_bits": self.weight_bits, "type": self.kind} | sizes
        return ({} if self.input_bits is None else {"input_activations": inputs}) | {
            "weights": weights,
            "targets": list(targets),
        }


def quantization_config(
    layers: Mapping[str, LayerAlgo], excluded: Sequence[str], kv_algo: str | None, *, with_table: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(flat block for config.json, nested content of hf_quant_config.json).

    `layers`: hub name of each quantized linear -> its algorithm; at least one (ValueError). `excluded`: the entries
    of the exclude list as servers.exclude_entries makes them. `kv_algo`: "FP8", "NVFP4" or None. `with_table`: a table
    of the layers even where all have one algorithm.
    """
    if not layers:
        raise ValueError("no layer is quantized, there is nothing to describe")
    kinds: dict[LayerAlgo, list[str]] = {}
    for name in sorted(layers):
        kinds.setdefault(layers[name], []).append(name)
    excludes = sorted(set(excluded))
    head = _head(list(kinds), with_table)
    table = {name: layers[name].entry() for name in sorted(layers)}
    mixed = {"quantized_layers": table} if head["quant_algo"] == MIXED else {}
    flat = {
        "quant_method": "modelopt",
        **head,
        **_groups(kinds, head["quant_algo"] != MIXED),
        **_flat_kv(kv_algo),
        "ignore": excludes,
        **mixed,
        "producer": {"name": "hf-ptq", "version": package_version()},
    }
    # The layout's version with our name as its local part: true, and still a version to a loader that parses it.
    local = ".".join(["hf", "ptq", *package_version().replace("+", ".").split(".")])
    nested = {
        "producer": {"name": "modelopt", "version": f"{LAYOUT_VERSION}+{local}"},
        "quantization": {**head, "kv_cache_quant_algo": kv_algo, "exclude_modules": excludes, **copy.deepcopy(mixed)},
    }
    return flat, nested


def exported_config(source_config: dict[str, Any], flat: dict[str, Any] | None) -> dict[str, Any]:
    """config.json of the export: the source's, key by key in its order, with `quantization_config` set to `flat`.

    None: the export is loaded as an unquantized model.

    What a quantized source said about its own tensors is dropped wherever loaders look for it.
    """
    config = copy.deepcopy(source_config)
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        part.pop("quantization_config", None)
        part.pop("compression_config", None)
    return config | ({} if flat is None else {"quantization_config": copy.deepcopy(flat)})


def json_text(data: Mapping[str, Any]) -> str:
    """The text of a JSON file: two spaces, keys in the order given, letters as they are, a newline at the end."""
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file as `json_text` spells it, in UTF-8. Raises RunError where the disk refuses."""
    try:
        path.write_text(json_text(data), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from error


def disagreements(config: Mapping[str, Any], nested: Mapping[str, Any]) -> list[str]:
    """Fields in which config.json and hf_quant_config.json say different things; what is missing counts as None."""
    flat = config.get("quantization_config") or {}
    block = nested.get("quantization") or {}
    scheme = flat.get("kv_cache_scheme")
    pairs = {
        "quant_algo": (flat.get("quant_algo"), block.get("quant_algo")),
        "the KV cache's algo": ("FP8" if scheme == FP8_KV_SCHEME else scheme, block.get("kv_cache_quant_algo")),
        "group_size": (flat.get("group_size"), block.get("group_size")),
        "the excluded modules": (set(flat.get("ignore") or ()), set(block.get("exclude_modules") or ())),
        "quantized_layers": (flat.get("quantized_layers") or {}, block.get("quantized_layers") or {}),
    }
    found = [
        f"config.json and {NESTED_NAME} differ in {what}: {_brief(a)} and {_brief(b)}"
        for what, (a, b) in pairs.items()
        if a != b
    ]
    return [*found, *_unreadable(flat, nested)]


def package_version() -> str:
    """The installed version of hf-ptq; "0" where it runs from a directory that was never installed."""
    try:
        return metadata.version("hf-ptq")
    except metadata.PackageNotFoundError:
        return "0"


def _unreadable(flat: Mapping[str, Any], nested: Mapping[str, Any]) -> Iterator[str]:
    """What would keep a loader from recognising the files."""
    method, producer = flat.get("quant_method"), (nested.get("producer") or {}).get("name")
    if method != "modelopt":
        yield f"config.json: quant_method is {method!r}, loaders know this layout by 'modelopt'"
    if producer != "modelopt":
        yield f"{NESTED_NAME}: producer.name is {producer!r}, loaders know this layout by 'modelopt'"
    groups = (flat.get("config_groups") or {}).values()
    if flat.get("quant_algo") == "NVFP4" and groups and not any(g.get("input_activations") for g in groups):
        yield "config.json: NVFP4 without input_activations in any config group is read as W4A16_NVFP4"


def _head(kinds: Sequence[LayerAlgo], with_table: bool) -> dict[str, Any]:
    """The algorithm of the whole checkpoint, and the group size where there is only one."""
    if len(kinds) == 1 and not with_table:
        return kinds[0].entry()
    of_fp4 = [kind for kind in kinds if "NVFP4" in kind.algo]  # SGLang takes the size at the top for these
    in_rows = [kind for kind in kinds if kind.block is None]  # blocks over rows have a name of their own
    sizes = {kind.group_size for kind in of_fp4 or in_rows or kinds} - {None}
    return {"quant_algo": MIXED} | ({"group_size": sizes.pop()} if len(sizes) == 1 else {})


def _groups(kinds: Mapping[LayerAlgo, Sequence[str]], single: bool) -> dict[str, Any]:
    """`config_groups`, one for each kind of layer that has one; a single one is for every Linear."""
    wanted = [(kind, ["Linear"] if single else names) for kind, names in kinds.items() if kind.algo in WITH_GROUPS]
    groups = {f"group_{number}": kind.group(targets) for number, (kind, targets) in enumerate(wanted)}
    return {"config_groups": groups} if groups else {}


def _flat_kv(kv_algo: str | None) -> dict[str, Any]:
    """The KV cache in config.json: a dict for FP8; else the name, also under the key that vLLM and SGLang look up."""
    if kv_algo is None:
        return {}
    if kv_algo == "FP8":
        return {"kv_cache_scheme": dict(FP8_KV_SCHEME)}
    return {"kv_cache_scheme": kv_algo, "kv_cache_quant_algo": kv_algo}


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
