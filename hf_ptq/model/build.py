"""A model on the meta device, filled unit by unit from lazy tensors with transformers' own loader.

One path for every plan: build the model without memory, (expert parallelism and FSDP2 put their placeholders in
here), then let the loader's `convert_and_load_state_dict_in_model` fill it from a *virtual checkpoint* of lazy
tensors. `from_pretrained` is not used: it knows no units, no replicated dense part beside sharded experts, and drops
what the model does not build. This file alone touches the loader's non-public functions; what it needs of them is
checked when it is imported, since they move between minor versions of transformers.

It does not know recipes, formats or exports.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import initialization as hf_initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.loading_report import LoadStateDictInfo

from hf_ptq.checkpoint.dtypes import FLOAT_DTYPES, TORCH_DTYPES
from hf_ptq.checkpoint.headers import TensorEntry
from hf_ptq.checkpoint.names import Placement, place_tensors
from hf_ptq.checkpoint.slices import LazyTensor
from hf_ptq.checkpoint.source import Source
from hf_ptq.errors import Problem, RunError, UserError, refuse_if_any
from hf_ptq.model.families import FUSED_EXPERTS
from hf_ptq.model.views import FusedParameter
from hf_ptq.model.wrappers import named_tensors

NOT_READ_YET = "quantized sources are not read yet; dequantize it first"
MAX_PROBLEMS = 20
OTHER_MODEL = "config.json belongs to another model"


@dataclass
class MetaModel:
    """A model without weights, and how the source's tensors reach it."""

    model: PreTrainedModel
    dtype: torch.dtype
    conversions: list[Any]  # transformers' WeightConverter and WeightRenaming objects of this model
    placements: dict[str, Placement]
    stacking: dict[str, tuple[str, ...]]  # see model/views.py: patterns of converters that only stack experts
    fused: dict[str, FusedParameter] = field(default_factory=dict)  # parameter -> experts that are one on the hub


def build_meta_model(
    source: Source, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> MetaModel:
    """The model of `source` on the meta device, with the placement of every source tensor.

    Raises UserError where transformers cannot build it, where a parameter has no source tensor, and where a source
    tensor has another shape than its parameter; all at once.
    """
    config = _read_config(source, trust_remote_code)
    dtype = _model_dtype(config, source)
    with torch.device("meta"), hf_initialization.no_tie_weights(), hf_initialization.no_init_weights():
        model = _instantiate(config, dtype, attn_implementation, trust_remote_code)
    model.eval()
    conversions = get_model_conversion_mapping(model)
    placements = _place(model.state_dict(), model.base_model_prefix, conversions, source.tensors)
    stacking = _stacking(conversions)
    meta = MetaModel(model, dtype, conversions, placements, stacking, _fused(model))
    refuse_if_any(itertools.islice(_placement_problems(meta, source), MAX_PROBLEMS))
    _load_generation_config(model, source)
    return meta


def load_unit(meta: MetaModel, tensors: Mapping[str, LazyTensor], device: torch.device) -> None:
    """Fill the parameters that `tensors` (source names) belong to; every one of them has a placement.

    Raises RunError naming the tensors that could not be converted.
    """
    with _quiet_loader():
        info, _ = convert_and_load_state_dict_in_model(meta.model, dict(tensors), _load_config(meta, device))
    problems = [f"{name}: {reason.strip().splitlines()[-1]}" for name, reason in info.conversion_errors.items()]
    problems += [f"{item}: shape differs from the model's" for item in map(str, info.mismatched_keys)]
    if problems:
        raise RunError(*problems)


def finish_loading(meta: MetaModel, device: torch.device, elsewhere: Container[str] = ()) -> None:
    """Computed buffers, tied weights; raises RunError where a parameter was left without a value.

    `elsewhere`: parameters whose values are kept outside of the model.
    """
    model = meta.model
    loaded = {placement.parameter for placement in meta.placements.values()}
    missing = {name for name in model.state_dict() if name not in loaded}
    with _quiet_loader():
        info = LoadStateDictInfo(
            missing_keys=missing,
            unexpected_keys=set(),
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )
        model._finalize_model_loading(model, _load_config(meta, device), info)
    model.requires_grad_(False)
    tensors = (*model.named_parameters(), *model.named_buffers())
    left = [name for name, tensor in tensors if tensor.is_meta and name not in elsewhere]
    if left:
        raise RunError(Problem(f"never filled: {', '.join(left[:5])} ({len(left)} tensors)", "report this as a bug"))


def _load_config(meta: MetaModel, device: torch.device) -> LoadStateDictConfig:
    return LoadStateDictConfig(
        weight_mapping=meta.conversions,
        device_map={"": device},
        dtype=meta.dtype,
        dtype_plan=meta.model._get_dtype_plan(meta.dtype),
    )


@contextmanager
def _quiet_loader() -> Iterator[None]:
    """No progress bar and no load report of transformers': ours shows the whole load as one."""
    verbosity, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


# --- the model ---------------------------------------------------------------------------------


def _read_config(source: Source, trust_remote_code: bool) -> PretrainedConfig:
    try:
        return AutoConfig.from_pretrained(source.directory, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ArithmeticError, StrictDataclassError) as error:
        cure = f"transformers {transformers.__version__} reads it? if it is newer than that, upgrade transformers"
        raise UserError(Problem(f"config.json of {source.origin}: {_first_line(error)}", cure)) from error


def _instantiate(
    config: PretrainedConfig, dtype: torch.dtype, attn_implementation: str | None, trust_remote_code: bool
) -> PreTrainedModel:
    """The class that config.json names, else the causal language model of the type."""
    names = [name for name in (config.architectures or []) if name in dir(transformers)]
    options = {"dtype": dtype} | ({"attn_implementation": attn_implementation} if attn_implementation else {})
    try:
        if names:
            return getattr(transformers, names[0])._from_config(config, **options)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)
    except (ValueError, ImportError, KeyError, AttributeError, ArithmeticError, RuntimeError) as error:
        what = f"transformers cannot build {config.architectures or config.model_type}: {_first_line(error)}"
        raise UserError(Problem(what, "check --attn_implementation and config.json, or --trust_remote_code")) from error


def _model_dtype(config: PretrainedConfig, source: Source) -> torch.dtype:
    """What config.json declares (its language part's first), else the dtype that most stored floats have."""
    for part in (config, config.get_text_config()):
        if isinstance(part.dtype, torch.dtype):
            return part.dtype
    sizes: dict[str, int] = {}
    for entry in source.tensors.values():
        if entry.dtype in FLOAT_DTYPES:
            sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.num_bytes
    return TORCH_DTYPES[max(sizes, key=lambda name: sizes[name])] if sizes else torch.bfloat16


def _load_generation_config(model: PreTrainedModel, source: Source) -> None:
    """End and padding ids of the source's generation_config.json; it is not validated and never saved again."""
    path = source.directory / "generation_config.json"
    if model.can_generate() and path.is_file():
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # of JSON and of UTF-8
            raise UserError(Problem(f"{path} is not valid JSON: {error}", "mend it, or remove it")) from error
        ids = {key: data[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in data}
        model.generation_config = GenerationConfig(**ids)


# --- placements --------------------------------------------------------------------------------


def _place(
    known: dict[str, torch.Tensor], base_model_prefix: str, conversions: Iterable[Any], names: Iterable[str]
) -> dict[str, Placement]:
    """Source names -> where they go. `known`: names of the model's parameters and buffers."""
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]

    def rename(name: str) -> tuple[str | None, str | None]:
        target, pattern = rename_source_key(name, renamings, converters, base_model_prefix, known)
        if target not in known and name in known:  # renamed by a rule that was not meant for it
            target, pattern = rename_source_key(name, [], [], base_model_prefix, known)
        return (target, pattern) if target in known else (None, None)

    return place_tensors(sorted(names, key=dot_natural_key), rename)


# --- a model in memory -------------------------------------------------------------------------


def describe_model(model: PreTrainedModel) -> tuple[MetaModel, dict[str, TensorEntry]]:
    """A model in memory as a checkpoint of it would be read: the checkpoint's tensors, by names and shapes alone."""
    known = named_tensors(model)
    tied = set(model.all_tied_weights_keys)
    shapes = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in known.items() if n not in tied}
    originals = original_tensors(model, shapes)
    conversions = get_model_conversion_mapping(model)
    placements = _place(known, model.base_model_prefix, conversions, originals)
    entries = {n: TensorEntry(n, "", "", tuple(t.shape), 0, 0) for n, t in originals.items()}
    return MetaModel(model, model.dtype, conversions, placements, _stacking(conversions), _fused(model)), entries


def original_tensors(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the model's names -> by the hub's, unstacked as they are stored there."""
    return revert_weight_conversion(model, tensors)


def _stacking(conversions: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    """Source pattern -> all patterns of its converter, for those that stack experts and then join rows, no more."""
    found = {}
    for entry in conversions:
        if not isinstance(entry, WeightConverter):
            continue
        patterns = tuple(entry.source_patterns)
        match entry.operations:
            case [MergeModulelist(dim=0)] if len(patterns) == 1:
                found[patterns[0]] = patterns
            case [MergeModulelist(dim=0), Concatenate(dim=1)]:
                found |= dict.fromkeys(patterns, patterns)
    return found


def _fused(model: PreTrainedModel) -> dict[str, FusedParameter]:
    """Parameter -> what is known of its experts, where the hub has them in one tensor."""
    found = {}
    for name, module in model.named_modules():
        family = FUSED_EXPERTS.get(type(module).__name__)
        if family is None:
            continue
        is_transposed = bool(module.is_transposed)
        for leaf, projections in family.projections.items():
            experts, rows, inputs = module.get_parameter(leaf).shape
            if is_transposed:
                rows, inputs = inputs, rows
            shape = (experts, rows, inputs)
            found[f"{name}.{leaf}"] = FusedParameter(projections, shape, is_transposed, family.stays_fused)
    return found


def _placement_problems(meta: MetaModel, source: Source) -> Iterator[Problem]:
    """Parameters without a source tensor, and tensors of the wrong shape."""
    known = meta.model.state_dict()
    filled = {placement.parameter for placement in meta.placements.values()}
    missing = [name for name in known if name not in filled and name not in meta.model.all_tied_weights_keys]
    if missing:
        shown = ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
        yield Problem(
            f"{source.origin} lacks {len(missing)} tensors that {type(meta.model).__name__} needs: {shown}",
            "the checkpoint is incomplete, or config.json belongs to another model",
        )
    yield from _stack_problems(meta, source)
    for name, placement in meta.placements.items():
        if placement.parameter is None or placement.pattern is not None:
            continue
        dtype = source.tensors[name].dtype
        if dtype not in FLOAT_DTYPES and known[placement.parameter].is_floating_point():
            yield Problem(f"{name} is stored as {dtype}: a quantized source", NOT_READ_YET)
        stored, wanted = source.tensors[name].shape, tuple(known[placement.parameter].shape)
        if stored != wanted:
            yield Problem(
                f"{name} has shape {list(stored)}, the model of config.json needs {list(wanted)}",
                "config.json belongs to another model",
            )


def _stack_problems(meta: MetaModel, source: Source) -> Iterator[Problem]:
    """Stacked experts of which some are missing, or of another shape than the parameter has room for."""
    known = meta.model.state_dict()
    stacks: dict[str, dict[str, list[str]]] = {}
    for name, placement in meta.placements.items():
        if placement.parameter is not None and placement.pattern in meta.stacking:
            stacks.setdefault(placement.parameter, {}).setdefault(placement.pattern, []).append(name)
    for parameter, by_pattern in stacks.items():
        experts, rows, *inner = known[parameter].shape
        patterns = meta.stacking[next(iter(by_pattern))]
        for pattern in patterns:
            members = by_pattern.get(pattern, [])
            wanted = [rows // len(patterns), *inner]
            if len(members) != experts:
                what = f"{parameter} needs {experts} experts, {source.origin} has {len(members)} of {pattern!r}"
                yield Problem(what, f"the checkpoint is incomplete; it has {', '.join(members[:4])} ...")
            for name in members:
                if source.tensors[name].dtype not in FLOAT_DTYPES:
                    yield Problem(f"{name} is stored as {source.tensors[name].dtype}: a quantized source", NOT_READ_YET)
                if list(source.tensors[name].shape) != wanted:
                    shape = list(source.tensors[name].shape)
                    yield Problem(f"{name} has shape {shape}, the model of config.json needs {wanted}", OTHER_MODEL)


def _first_line(error: Exception) -> str:
    """The message on one line, cut; libraries put the reason on the second."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
