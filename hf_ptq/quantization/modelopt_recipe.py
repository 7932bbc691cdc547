"""ModelOpt's recipe files, as they are: `metadata` and `quantize`, read into rules.

    metadata: {recipe_type: ptq, description: ...}
    quantize:
      algorithm: max
      quant_cfg:                                     # in order, the last entry that fits a quantizer decides it
        - {quantizer_name: "*", enable: false}
        - {quantizer_name: "*weight_quantizer", cfg: {num_bits: e4m3, axis: null}}

A file may also be the `quantize` part alone, or a directory with metadata.yml and quantize.yml. `kv_cache`, beside or
in `quantize`, is a quant_cfg of its own that comes last, or the name of a KV preset; entries beside it that give keys
and values, by name, something else are refused. A quantizer that no entry speaks about is on and INT8, as ModelOpt
makes it; its recipes therefore begin by turning everything off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from hf_ptq.errors import Problem
from hf_ptq.quantization.algorithm import AlgorithmSpec, Max, read_algorithm
from hf_ptq.quantization.contradictions import says_otherwise
from hf_ptq.quantization.modelopt_imports import load_resolved
from hf_ptq.quantization.numerics import Attributes, meaning
from hf_ptq.quantization.rules import ATTENTION, QuantizerRule
from hf_ptq.quantization.yaml_files import validated

SECTIONS = ("metadata", "quantize")
# What a quantizer is before any entry speaks: INT8, weights of linears per output row, everything else per tensor.
_TENSOR = meaning([Attributes()])
UNTOUCHED = (
    QuantizerRule(("*",), True, (), *meaning([Attributes(axis=0)]), optional=True, speaks_of=frozenset({"weight"})),
    QuantizerRule(("*_weight_quantizers.*",), True, (), *_TENSOR, optional=True, speaks_of=frozenset({"weight"})),
    QuantizerRule(("*",), True, (), *_TENSOR, optional=True, speaks_of=frozenset({"input", *ATTENTION})),
)

# ModelOpt's own recipes that are presets here, by their path in its library: general/ptq/NAME-kv_CACHE.
GENERAL, SHIPPED = "general/", "general/ptq/"
PRESETS = {
    "fp8_default": "fp8",
    "nvfp4_default": "nvfp4",
    **{name: name for name in ("nvfp4_experts_only", "nvfp4_mlp_only", "nvfp4_omlp_only")},
    "nvfp4_weight_only": "w4a16_nvfp4",
}
CACHES = {"fp8": "fp8", "fp8_cast": "fp8_cast", "nvfp4_cast": "nvfp4_cast", "fp16": "none"}

# Settings of an algorithm that change no range: ranks always agree, a forward that nothing needs is always left out.
NO_EFFECT = ("distributed_sync", "skip_forward_without_activation_calib", "shared_states")


class Metadata(BaseModel):
    """What a file is."""

    model_config = ConfigDict(extra="forbid")

    recipe_type: str
    description: str = ""


class Entry(BaseModel):
    """One entry of quant_cfg as written."""

    model_config = ConfigDict(extra="forbid")

    quantizer_name: str
    parent_class: str | None = None
    cfg: Attributes | list[Attributes] | None = None
    enable: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _says_something(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("cfg") and data.get("enable") is None:
            raise ValueError("an entry has cfg, which is not empty, or enable")
        return data


class Quantize(BaseModel):
    """The part that says what is quantized with what."""

    model_config = ConfigDict(extra="forbid")

    algorithm: AlgorithmSpec = Max()
    quant_cfg: list[Any] = Field(default_factory=list)
    effective_bits: float | None = None
    kv_cache: Any = None

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm(cls, value: Any) -> AlgorithmSpec:
        steps = value if isinstance(value, list) else [value]
        return read_algorithm([_with_effect(step) if isinstance(step, dict) else step for step in steps])


def _with_effect(settings: dict[str, Any]) -> dict[str, Any]:
    """An algorithm's settings without those that change the order of the work only, or nothing."""
    layerwise = settings.get("layerwise")
    reorders = not (isinstance(layerwise, dict) and layerwise.get("get_qdq_activations_from_prev_layer"))
    same = [*NO_EFFECT, *(["layerwise"] if reorders else [])]
    return {key: value for key, value in settings.items() if key not in same and value is not None}


class Part(BaseModel):
    """A recipe file of ModelOpt's, by its sections."""

    model_config = ConfigDict(extra="forbid")

    metadata: Metadata
    quantize: Quantize
    kv_cache: Any = None


@dataclass(frozen=True)
class ModelOptRecipe:
    """What a file comes to: rules with all imports in place, the algorithm as written, a KV preset's name."""

    description: str
    rules: tuple[QuantizerRule, ...]
    algorithm: AlgorithmSpec
    kv_cache: str | None = None


def is_modelopt(data: Any) -> bool:
    """True for the content of a file of ModelOpt's."""
    return isinstance(data, dict) and bool({"quantize", "metadata", "quant_cfg", "imports"} & set(data))


def preset_of(path: str) -> tuple[str, str] | None:
    """(preset, KV preset) that a path in ModelOpt's library stands for; None where there is no such preset."""
    name, _, cache = path.removeprefix(SHIPPED).removesuffix(".yaml").removesuffix(".yml").partition("-kv_")
    known = path.startswith(SHIPPED) and name in PRESETS and cache in CACHES
    return (PRESETS[name], CACHES[cache]) if known else None


def read_modelopt(path: Path, problems: list[Problem]) -> ModelOptRecipe | None:
    """The recipe of a file or a directory; None where problems were found, which are appended."""
    data = _sections(path, problems)
    if data is None:
        return None
    if "quant_cfg" in data:  # the part alone
        data = {"metadata": {"recipe_type": "ptq"}, "quantize": data}
    kind = (data.get("metadata") or {}).get("recipe_type") if isinstance(data.get("metadata"), dict) else None
    if kind not in (None, "ptq"):
        cure = "give a recipe of the type ptq; what it quantizes with what can be written into one"
        problems.append(Problem(f"{path}: recipes of the type {kind} are not built", cure))
        return None
    part = validated(Part, data, str(path), problems)
    if part is None:
        return None
    before = len(problems)
    rules, cache = _rules(part.quantize.quant_cfg, path, problems), ()
    kv = part.quantize.kv_cache if part.kv_cache is None else part.kv_cache
    if isinstance(kv, dict):
        quantize = validated(Quantize, kv, f"{path}: kv_cache", problems)
        cache = _rules(quantize.quant_cfg, f"{path}: kv_cache", problems) if quantize else ()
    elif kv is not None and not isinstance(kv, str):
        problems.append(Problem(f"{path}: kv_cache is neither a name nor a mapping with quant_cfg"))
    if cache and (said := says_otherwise(rules, cache)):
        what = f"{path}: kv_cache contradicts quant_cfg, whose entries say: {said}"
        problems.append(Problem(what, "take kv_cache out, or these entries"))
    if len(problems) > before:
        return None
    return ModelOptRecipe(
        description=part.metadata.description,
        rules=(*UNTOUCHED, *rules, *cache),
        algorithm=part.quantize.algorithm,
        kv_cache=kv if isinstance(kv, str) else None,
    )


def _sections(path: Path, problems: list[Problem]) -> dict[str, Any] | None:
    """The content of a file, or of the files of a directory, one a section."""
    if not path.is_dir():
        data = load_resolved(path, problems)
        if data is None or isinstance(data, dict):
            return data
        cure = "give a file with metadata and quantize; this one is a piece that such a file imports"
        problems.append(Problem(f"{path}: a {type(data).__name__} is no recipe", cure))
        return None
    found = {name: _section_file(path, name) for name in SECTIONS}
    missing = [name for name, file in found.items() if file is None]
    if missing:
        cure = "a directory is a recipe of ModelOpt's with the files " + " and ".join(
            f"{name}.yml" for name in SECTIONS
        )
        problems.append(Problem(f"{path}: there is no {' and no '.join(f'{name}.yml' for name in missing)}", cure))
        return None
    before = len(problems)
    sections = {name: load_resolved(file, problems) for name, file in found.items() if file is not None}
    return sections if len(problems) == before else None


def _section_file(folder: Path, name: str) -> Path | None:
    return next((p for end in ("yml", "yaml") if (p := folder / f"{name}.{end}").is_file()), None)


def _rules(entries: list[Any], path: Path | str, problems: list[Problem]) -> tuple[QuantizerRule, ...]:
    """The entries as rules; neighbours that turn off alike become one."""
    read = [validated(Entry, entry, f"{path}: quant_cfg[{i}]", problems) for i, entry in enumerate(entries)]
    rules = [_rule(entry) for entry in read if entry is not None]
    return tuple(_joined(rules))


def _joined(rules: list[QuantizerRule]) -> Iterator[QuantizerRule]:
    def kind(rule: QuantizerRule) -> tuple[bool, bool, tuple[str, ...]]:
        return bool(rule.formats or rule.reasons), rule.enable, rule.parent_class

    for (has_cfg, enable, classes), group in groupby(rules, kind):
        if has_cfg:
            yield from group
        else:
            patterns = tuple(pattern for rule in group for pattern in rule.pattern)
            yield QuantizerRule(patterns, enable, classes, optional=not enable)


def _rule(entry: Entry) -> QuantizerRule:
    classes = (entry.parent_class.rpartition(".")[2],) if entry.parent_class else ()
    pattern, enable = (entry.quantizer_name,), entry.enable is not False
    if not entry.cfg:
        return QuantizerRule(pattern, enable, classes, optional=not enable)
    formats, reasons = meaning(entry.cfg if isinstance(entry.cfg, list) else [entry.cfg])
    return QuantizerRule(pattern, enable, classes, formats, reasons, optional=not enable)
