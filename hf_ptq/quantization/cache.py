"""The KV cache: which formats its keys and values get, decided on a model without weights.

A server has one format for the cache of all layers, so a recipe gives it to all attention layers of the language
model or to none; patterns of `k` and `v` rules are compared with the names of attention modules. Rules of
ours that turn modules off are about linears, so that layers which are left alone have the cache of all others; only
where such rules, after the last for `k` and `v`, turn every attention module off, the cache stays as it is. Either is
told. A calibrated cache needs modules that quantizers can look into; one with constant scales needs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from hf_ptq.errors import Problem, UserError, refuse_if_any
from hf_ptq.model.attention import attention_modules, is_latent, takes_registry
from hf_ptq.model.views import WeightView
from hf_ptq.model.wrappers import named
from hf_ptq.quantization.formats.description import FORMATS, NumberFormat
from hf_ptq.quantization.places import attention_places
from hf_ptq.quantization.recipe import Recipe
from hf_ptq.quantization.rules import ATTENTION, CACHE, AnyRule, Decision, Place, QuantizerRule, Rule, Tensor, settle

CURE = "use --kv_cache_qformat fp8_cast or none"
OFF = "turn it off in the recipe (enable: false); --kv_cache_qformat says what becomes of keys and values"
WORDS: dict[Tensor, str] = {"q": "the queries", "k": "the keys", "v": "the values", "p": "the attention weights"}
ANY_LAYER = "model.layers.0.self_attn"  # where a model shows no attention module, rules are asked about such a one


@dataclass(frozen=True)
class QuantizedCache:
    """The formats of keys and values, and what multi-head latent attention is calibrated on.

    `layers`: the model's name of each attention module -> the source's. `rule`: what decided.
    """

    k: NumberFormat
    v: NumberFormat
    mla: str
    layers: dict[str, str]
    rule: str = ""

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
    if not any("k" in rule.speaks_of for rule in recipe.rules):
        return None, []
    attention = attention_modules(model)
    layers = _source_names(attention, views)
    places = attention_places(layers, named(model))
    chosen = _of_all_layers(recipe.rules, places or (Place((ANY_LAYER,)),))
    if chosen is None:
        return None, []
    turned_off = _turned_off(recipe.rules, places) if attention else {}
    told = _told_of_turned_off(turned_off, len(places))
    if turned_off and len(turned_off) == len(places):
        return None, told
    k, v = chosen
    rule = str(k.rule) if k.rule == v.rule else f"{k.rule}, {v.rule}"
    cache = QuantizedCache(FORMATS[str(k.format)], FORMATS[str(v.format)], k.mla, layers, rule)
    opaque = sorted({type(module).__name__ for module in attention.values() if not takes_registry(module)})
    blind = opaque or ([] if attention else [type(model).__name__])
    if blind and cache.needs_data:
        what = f"{', '.join(blind)}: no quantizer can look at its keys and values, so they cannot be calibrated"
        raise UserError(Problem(what, CURE))
    _refuse_head_size(cache, model, attention)
    _refuse_bias(cache, attention)
    return cache, [
        *told,
        *(f"previews do not round the KV cache: {name} computes attention by itself" for name in blind),
    ]


def _source_names(attention: Mapping[str, nn.Module], views: Sequence[WeightView]) -> dict[str, str]:
    """The model's names of attention modules -> the source's: the parents of one linear in both."""
    source_of = {view.owner: view.modules[0] for view in views if not view.is_stacked}
    parents = {owner.rpartition(".")[0]: module.rpartition(".")[0] for owner, module in source_of.items()}
    return {name: parents.get(name, name) for name in attention}


def _of_all_layers(rules: Sequence[AnyRule], places: Sequence[Place]) -> tuple[Decision, Decision] | None:
    """What is decided for keys and for values, if the rules give every layer the same; None where they give none."""
    found: dict[str, dict[Tensor, Decision]] = {
        place.names[0]: {tensor: settle(rules, tensor, place) for tensor in ATTENTION} for place in places
    }
    wrong = {
        (tensor, decision.rule): Problem(
            f"{decision.rule} quantizes {WORDS[tensor]} of {layer}: {decision.reason}", OFF
        )
        for layer, said in reversed(found.items())  # so that the first layer is named
        for tensor, decision in said.items()
        if decision.reason
    }
    refuse_if_any(wrong.values())
    first = next(iter(found.values()))
    _refuse_several(found, any(isinstance(rule, QuantizerRule) for rule in rules))
    k, v = first["k"].format, first["v"].format
    if (k is None) != (v is None):
        what = f"the recipe quantizes {'values' if k is None else 'keys'} only, servers cache both in one format"
        raise UserError(Problem(what, "give both k and v a format"))
    return (first["k"], first["v"]) if k is not None and v is not None else None


def _refuse_several(found: Mapping[str, Mapping[Tensor, Decision]], of_quantizers: bool) -> None:
    """One format for all layers, or none. `found`: layer -> what is decided for its keys and values."""
    kinds: dict[tuple[object, object], list[str]] = {}
    for layer, said in found.items():
        kinds.setdefault((said["k"].effect, said["v"].effect), []).append(layer)
    if len(kinds) == 1:
        return
    shown = []
    for layers in kinds.values():
        k, v = (found[layers[0]][tensor] for tensor in CACHE)
        formats = " and ".join(dict.fromkeys(decision.format or "none" for decision in (k, v)))
        by = f", by {k.rule}" if k.rule and k.format is None else ""
        example = f"{layers[0]}{' ...' if len(layers) > 1 else ''}{by}"
        shown.append(f"{len(layers)} {'' if shown else 'of them '}{formats} ({example})")
    what = f"servers have one format for the KV cache of all layers, the recipe gives {' and '.join(shown)}"
    ours = "give k and v rules a pattern that matches every attention module, such as '*'"
    theirs = "put the entry for keys and values (*[kv]_bmm_quantizer) last"
    raise UserError(Problem(what, theirs if of_quantizers else ours))


def _turned_off(rules: Sequence[AnyRule], places: Sequence[Place]) -> dict[str, str]:
    """The attention modules that our rules after the last one for k and v turn off -> the pattern that does."""
    last = max((i for i, rule in enumerate(rules) if rule.of_attention), default=-1)
    after = [rule for rule in rules[last + 1 :] if isinstance(rule, Rule)]
    found = {place.names[0]: settle(after, "weight", place) for place in places}
    return {layer: said.rule for layer, said in found.items() if said.rule is not None and not said.asks}


def _told_of_turned_off(turned_off: Mapping[str, str], num_layers: int) -> list[str]:
    if not turned_off:
        return []
    by = f"after the rules for k and v, by {' and '.join(map(repr, dict.fromkeys(turned_off.values())))}"
    if len(turned_off) == num_layers:
        end = "keys and values stay as they are; put the rule for k and v last to quantize them"
        return [f"all attention modules are turned off {by}: {end}"]
    example = next(iter(turned_off)) + (" ..." if len(turned_off) > 1 else "")
    end = (
        "servers have one format for all layers, so the cache is quantized there too; the rule for k and v may be last"
    )
    return [f"{len(turned_off)} of {num_layers} attention modules ({example}) are turned off {by}: {end}"]


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
