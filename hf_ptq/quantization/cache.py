"""The KV cache: which formats its keys and values get, decided on a model without weights.

A server has one format for the cache of all layers, so a recipe gives it to all attention layers of the language
model or to none; patterns of `k` and `v` rules are compared with the names of attention modules. A calibrated cache
needs modules that quantizers can look into; one with constant scales needs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from hf_ptq.errors import Problem, UserError
from hf_ptq.model.attention import attention_modules, is_latent, takes_registry
from hf_ptq.model.views import WeightView
from hf_ptq.quantization.formats.description import FORMATS, NumberFormat
from hf_ptq.quantization.recipe import Recipe, Rule

CURE = "use --kv_cache_qformat fp8_cast or none"


@dataclass(frozen=True)
class QuantizedCache:
    """The formats of keys and values, and what multi-head latent attention is calibrated on.

    `layers`: the model's name of each attention module -> the source's.
    """

    k: NumberFormat
    v: NumberFormat
    mla: str
    layers: dict[str, str]

    @property
    def needs_data(self) -> bool:
        """True where ranges have to be calibrated, and scales are stored."""
        return self.k.needs_data or self.v.needs_data


def decide_cache(
    recipe: Recipe, model: PreTrainedModel, views: Sequence[WeightView]
) -> tuple[QuantizedCache | None, list[str]]:
    """The cache that the recipe asks for, None where it asks for none, and warnings.

    Raises UserError where rules cover only some layers, where a calibrated cache cannot be looked into, and where a
    head is no multiple of the format's blocks.
    """
    asking = [rule for rule in recipe.rules if rule.k is not None]
    if not asking:
        return None, []
    attention = attention_modules(model)
    layers = _source_names(attention, views)
    rule = _rule_of_all_layers(asking, layers) if layers else asking[-1]
    if rule is None:
        return None, []
    cache = QuantizedCache(FORMATS[str(rule.k)], FORMATS[str(rule.v)], rule.mla, layers)
    opaque = sorted({type(module).__name__ for module in attention.values() if not takes_registry(module)})
    blind = opaque or ([] if attention else [type(model).__name__])
    if blind and cache.needs_data:
        what = f"{', '.join(blind)}: no quantizer can look at its keys and values, so they cannot be calibrated"
        raise UserError(Problem(what, CURE))
    _refuse_head_size(cache, model, attention)
    _refuse_bias(cache, attention)
    return cache, [f"previews do not round the KV cache: {name} computes attention by itself" for name in blind]


def _source_names(attention: Mapping[str, nn.Module], views: Sequence[WeightView]) -> dict[str, str]:
    """The model's names of attention modules -> the source's: the parents of one linear in both."""
    source_of = {view.owner: view.modules[0] for view in views if not view.is_stacked}
    parents = {owner.rpartition(".")[0]: module.rpartition(".")[0] for owner, module in source_of.items()}
    return {name: parents.get(name, name) for name in attention}


def _rule_of_all_layers(rules: Sequence[Rule], layers: Mapping[str, str]) -> Rule | None:
    """The last rule that matches, if it gives the same to every layer; None if no layer is matched."""
    chosen: dict[str, Rule | None] = {}
    for own, source in layers.items():
        matching = [r for r in rules if any(fnmatchcase(n, p) for p in r.pattern for n in (own, source))]
        chosen[source] = matching[-1] if matching else None
    kinds = {(rule.k, rule.v, rule.mla) if rule else None for rule in chosen.values()}
    if len(kinds) > 1:
        shown = ", ".join(f"{layer}: {rule.k if rule else 'none'}" for layer, rule in list(chosen.items())[:4])
        what = f"servers have one format for the KV cache of all layers, the recipe gives {shown} ..."
        raise UserError(Problem(what, "give k and v rules a pattern that matches every attention module, such as '*'"))
    return next(iter(chosen.values()))


def _refuse_bias(cache: QuantizedCache, attention: Mapping[str, nn.Module]) -> None:
    """A mean of each channel is of keys and values that two linears make."""
    if not (cache.k.has_bias or cache.v.has_bias):
        return
    without = sorted({type(m).__name__ for m in attention.values() if not {"k_proj", "v_proj"} <= m._modules.keys()})
    if without:
        what = f"{', '.join(without)}: no k_proj and v_proj, so {cache.k.name} knows no channels of keys and values"
        raise UserError(Problem(what, CURE))


def _refuse_head_size(cache: QuantizedCache, model: PreTrainedModel, attention: Mapping[str, nn.Module]) -> None:
    config = model.config.get_text_config().to_dict()
    latent = [module for module in attention.values() if is_latent(module)]
    keys = ("kv_lora_rank", "qk_rope_head_dim") if latent and cache.mla == "latent" else ("head_dim",)
    sizes = {key: config[key] for key in keys if config.get(key)}
    multiple = max(cache.k.input_multiple, cache.v.input_multiple)
    wrong = {key: size for key, size in sizes.items() if size % multiple}
    if wrong:
        shown = ", ".join(f"{key} {size}" for key, size in wrong.items())
        raise UserError(
            Problem(f"{cache.k.name} keys and values need multiples of {multiple}, the model has {shown}", CURE)
        )
