"""Rules: what a recipe says about the tensors of a module, and which rule decides.

A module has tensors that can be quantized: a linear its weight, its input and its output; attention its queries (q),
keys (k), values (v) and probabilities (p). Rules stand in order, and the last one that speaks about a tensor decides.
There are two kinds:

    Rule            ours: patterns on names of modules. One that speaks about a linear decides its weight and its input
                    together: a tensor that it gives no format is not quantized.
    QuantizerRule   ModelOpt's quant_cfg entry: patterns on names of quantizers (`model.layers.0.mlp.up_proj` has
                    `.weight_quantizer`, `.input_quantizer`, `.output_quantizer`; attention `.k_bmm_quantizer` ...).
                    Each tensor is decided by itself. An entry with `cfg` replaces what was said before, one with only
                    `enable` turns on or off what earlier entries said.

This module knows names only, no model and no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from functools import cached_property, lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from hf_ptq.quantization.formats.description import Role, formats_for, plain_formats_for

Tensor = Literal["weight", "input", "output", "q", "k", "v", "p"]
LINEAR: tuple[Tensor, ...] = ("weight", "input", "output")
CACHE: tuple[Tensor, ...] = ("k", "v")
ATTENTION: tuple[Tensor, ...] = ("q", *CACHE, "p")
ROLE_OF: dict[str, Role] = {"weight": "weight", "input": "input", "k": "kv", "v": "kv"}
OFF = "off"  # said of a tensor that stays as it is
SUFFIXES: dict[Tensor, str] = {
    **{tensor: f"{tensor}_quantizer" for tensor in LINEAR},
    **{tensor: f"{tensor}_bmm_quantizer" for tensor in ATTENTION},
}


@dataclass(frozen=True)
class Place:
    """A module as rules see it.

    `names`: in the source's words and in the model's own. `classes`: the names of its class and of that one's bases.
    `quantizers`: ModelOpt's names of the quantizer of each tensor, where they do not follow from `names`.
    """

    names: tuple[str, ...]
    classes: tuple[str, ...] = ()
    quantizers: Mapping[Tensor, tuple[str, ...]] = field(default_factory=dict)
    in_a_list: tuple[Tensor, ...] = ()  # their quantizers are children of a list, so no class of a parent fits them

    def quantizers_of(self, tensor: Tensor) -> tuple[str, ...]:
        """ModelOpt's names of the quantizer of one tensor."""
        known = self.quantizers.get(tensor)
        return tuple(f"{name}.{SUFFIXES[tensor]}" for name in self.names) if known is None else known


@dataclass(frozen=True)
class Known:
    """All places of a model, by their names. `holders`: those that only hold other modules, and no weight."""

    places: tuple[Place, ...]
    holders: frozenset[str] = frozenset()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name of a module."""
        return tuple(dict.fromkeys(name for place in self.places for name in place.names))

    @cached_property
    def with_weights(self) -> tuple[str, ...]:
        """The names that a rule on linears can be about."""
        return tuple(name for name in self.names if name not in self.holders)

    @cached_property
    def classes(self) -> frozenset[str]:
        """The classes of all modules, and their bases."""
        return frozenset(name for place in self.places for name in place.classes)

    @cached_property
    def quantizers(self) -> tuple[str, ...]:
        """ModelOpt's name of every quantizer."""
        tensors = (*LINEAR, *ATTENTION)
        return tuple(dict.fromkeys(n for place in self.places for t in tensors for n in place.quantizers_of(t)))


@dataclass(frozen=True)
class Said:
    """What one rule says about one tensor: a format (None: the one said before), on or off.

    `reason`: why the format that the rule asks for cannot be had.
    """

    rule: str
    enable: bool
    format: str | None = None
    reason: str | None = None
    mla: str = "latent"


@dataclass(frozen=True)
class Decision:
    """What all rules together say about a tensor. `format` None: it stays as it is. `rule` None: none speaks."""

    format: str | None = None
    rule: str | None = None
    reason: str | None = None
    mla: str = "latent"  # what latent attention is calibrated on

    @property
    def asks(self) -> bool:
        """True where the tensor is to be quantized, by a format that there is or by one that cannot be had."""
        return self.format is not None or self.reason is not None

    @property
    def effect(self) -> tuple[str | None, ...]:
        """What two decisions are compared by: the outcome, whichever rule led to it."""
        return self.format, self.reason, self.mla if self.format else None


class Rule(BaseModel):
    """One rule of a recipe file of ours; the schema is described in recipe.py."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: tuple[str, ...]
    parent_class: tuple[str, ...] = ()
    weight: str | None = None
    input: str | None = None
    output: str | None = None
    k: str | None = None
    v: str | None = None
    mla: Literal["latent", "expanded"] = "latent"
    enable: bool = True
    optional: bool = False

    @field_validator("pattern", "parent_class", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("weight", "input", "k", "v")
    @classmethod
    def _known_format(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            choices = plain_formats_for if _is_plain(info) else formats_for
            known = choices(ROLE_OF[str(info.field_name)])
            if value not in known:
                raise ValueError(f"unknown format {value!r}; formats for {info.field_name} are {', '.join(known)}")
        return value

    @field_validator("output")
    @classmethod
    def _no_output(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("no server reads the output of a linear quantized; for the KV cache give k and v")
        return value

    @model_validator(mode="after")
    def _says_something(self, info: ValidationInfo) -> Rule:
        gives = [self.weight, self.input, self.k, self.v]
        if not self.pattern:
            raise ValueError("pattern is empty")
        if not self.enable and any(gives):
            raise ValueError("a rule with enable: false cannot give formats")
        if self.enable and not any(gives):
            raise ValueError("a rule gives a format (weight, input, k, v) or says enable: false")
        if (self.k is None) != (self.v is None):
            raise ValueError("k and v belong together: give both a format")
        if self.input and not self.weight and not _is_plain(info):
            raise ValueError("input without weight: no server quantizes activations only")
        return self

    @property
    def speaks_of(self) -> frozenset[Tensor]:
        """The tensors that the rule decides."""
        linear = LINEAR if not self.enable or self.weight is not None or self.input is not None else ()
        return frozenset((*linear, *(CACHE if self.k is not None else ())))

    def says(self, tensor: Tensor, place: Place) -> Said | None:
        """What the rule says about a tensor of a module; None where it does not speak about it."""
        if tensor not in self.speaks_of or (self.parent_class and not set(self.parent_class) & set(place.classes)):
            return None
        pattern = matching(self.pattern, place.names)
        if pattern is None:
            return None
        classes = [name for name in place.classes if name in self.parent_class]
        rule = pattern + (f" in {classes[0]}" if classes else "")
        chosen = getattr(self, tensor) if self.enable else None
        return Said(rule, enable=chosen is not None, format=chosen, mla=self.mla)

    def unmatched(self, known: Known) -> list[str]:
        """What of the rule fits nothing, in words, where that is worth telling."""
        if self.optional:
            return []
        nothing = _fitting_nothing(self.pattern, known.names)
        holders = [] if "k" in self.speaks_of else _fitting_nothing(self.pattern, known.with_weights)
        return [
            *_no_module(nothing),
            *(
                f"pattern {pattern!r} matches only modules that hold others; what is in them matches '{pattern}.*'"
                for pattern in holders
                if pattern not in nothing
            ),
            *(_no_class(self.parent_class, known) or self._no_pair(nothing, known)),
        ]

    def _no_pair(self, nothing: Sequence[str], known: Known) -> list[str]:
        """The same where the patterns and the classes fit modules, and no module both."""
        if nothing or not self.parent_class or "k" in self.speaks_of:
            return []
        if any(self.says("weight", place) is not None for place in known.places):
            return []
        return [f"no module that {self.pattern[0]!r} matches is of the class {' or '.join(self.parent_class)}"]

    @property
    def gives_weights(self) -> bool:
        """True where the rule gives a format to weights."""
        return self.weight is not None

    @property
    def of_attention(self) -> dict[str, str]:
        """What the rule gives keys and values, and what latent attention is calibrated on if not on the latent."""
        if self.k is None or self.v is None:
            return {}
        return {"k": self.k, "v": self.v} | ({} if self.mla == "latent" else {"mla": self.mla})

    @property
    def attention_patterns(self) -> tuple[str, ...]:
        """The patterns that name modules of attention."""
        return self.pattern if self.k is not None else ()

    def without_cache(self) -> Rule | None:
        """The rule as far as it is about linears."""
        if self.k is None:
            return self
        return self.model_copy(update={"k": None, "v": None}) if self.weight is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as in a recipe file."""
        return self.model_dump(mode="json", exclude_defaults=True)


def _is_plain(info: ValidationInfo) -> bool:
    """Whether a rule is read for a model that no server is to load."""
    return bool(info.context)


@dataclass(frozen=True)
class QuantizerRule:
    """One entry of ModelOpt's quant_cfg, or several in a row that turn things off alike.

    `formats`: for each tensor the name of the format that `cfg` means there; empty for an entry without `cfg`.
    `reasons`: for the others why there is none. `optional`: it is no news if the patterns fit nothing.
    """

    pattern: tuple[str, ...]
    enable: bool = True
    parent_class: tuple[str, ...] = ()
    formats: Mapping[Tensor, str] = field(default_factory=dict)
    reasons: Mapping[Tensor, str] = field(default_factory=dict)
    optional: bool = False
    speaks_of: frozenset[Tensor] = frozenset((*LINEAR, *ATTENTION))

    def says(self, tensor: Tensor, place: Place) -> Said | None:
        """What the entry says about a tensor of a module; None where it does not speak about it."""
        if tensor not in self.speaks_of or not self._fits_class(tensor, place):
            return None
        pattern = matching(self.pattern, place.quantizers_of(tensor))
        if pattern is None:
            return None
        rule = pattern + (f" in {self.parent_class[0]}" if self.parent_class else "")
        return Said(rule, self.enable, self.formats.get(tensor), self.reasons.get(tensor))

    def _fits_class(self, tensor: Tensor, place: Place) -> bool:
        if not self.parent_class:
            return True
        return tensor not in place.in_a_list and bool(set(self.parent_class) & set(place.classes))

    def unmatched(self, known: Known) -> list[str]:
        """What of the entry fits nothing, in words, where that is worth telling."""
        if self.optional:
            return []
        return [*_no_module(_fitting_nothing(self.pattern, known.quantizers)), *_no_class(self.parent_class, known)]

    @property
    def gives_weights(self) -> bool:
        """True where the entry gives a format to weights, or one that there is not."""
        said = self.enable and ("weight" in self.formats or "weight" in self.reasons)
        return said and "weight" in self.speaks_of and _may_fit(self.pattern, ("weight",))

    @property
    def of_attention(self) -> dict[str, str]:
        """What the entry says of tensors of attention, where its patterns name them and can fit no linear's."""
        named = {t for t in self.speaks_of.intersection(ATTENTION) if _may_fit(self.attention_patterns, (t,))}
        words = {t: self.formats.get(t) or self.reasons.get(t) or "on" for t in ATTENTION if t in named}
        return words if self.enable else dict.fromkeys(words, OFF)

    @property
    def attention_patterns(self) -> tuple[str, ...]:
        """The patterns that name tensors of attention."""
        return tuple(p for p in self.pattern if _may_fit((p,), ATTENTION) and not _may_fit((p,), LINEAR))

    def without_cache(self) -> QuantizerRule | None:
        """The entry as far as it is about linears."""
        return QuantizerRule(**{**vars(self), "speaks_of": self.speaks_of.difference(ATTENTION)})

    def as_dict(self) -> dict[str, Any]:
        """Plain data, from which `quantizer_rule` makes the same rule."""
        lists = {"pattern": self.pattern, "parent_class": self.parent_class, "speaks_of": sorted(self.speaks_of)}
        maps = {"formats": dict(self.formats), "reasons": dict(self.reasons)}
        told = {"enable": self.enable, "optional": self.optional, **maps}
        return {OF_QUANTIZERS: {**{key: list(value) for key, value in lists.items()}, **told}}


OF_QUANTIZERS = "of_quantizers"  # the key of a rule on quantizers in plain data, which no file of a user has


def quantizer_rule(data: Mapping[str, Any]) -> QuantizerRule:
    """The rule of `QuantizerRule.as_dict`."""
    told = dict(data[OF_QUANTIZERS])
    lists = {key: tuple(told.pop(key)) for key in ("pattern", "parent_class")}
    return QuantizerRule(**lists, speaks_of=frozenset(told.pop("speaks_of")), **told)


AnyRule = Rule | QuantizerRule


def settle(rules: Sequence[AnyRule], tensor: Tensor, place: Place) -> Decision:
    """What the rules, read in order, come to for one tensor of a module: the last that speaks decides.

    One that only says "on" leaves the format to those before it.
    """
    last: Said | None = None
    for rule in reversed(rules):
        said = rule.says(tensor, place)
        if said is None:
            continue
        last = last or said
        if not last.enable:
            return Decision(None, last.rule)
        if said.format is not None or said.reason is not None:
            return Decision(said.format, last.rule, said.reason, said.mla)
    return Decision(None, last.rule if last else None)


def numbered(rules: Sequence[AnyRule]) -> list[AnyRule]:
    """The rules that can tell one expert of a layer from another: those with a part of a pattern that a number fits.

    Letters fit no number and a star fits every one, so the others say to one expert what they say to all.
    """
    return [rule for rule in rules if any(FITS_A_NUMBER.search(pattern) for pattern in rule.pattern)]


FITS_A_NUMBER = re.compile(r"[?\[]|(?<![A-Za-z0-9_-])\d+(?![A-Za-z0-9_])")


def matching(patterns: tuple[str, ...], names: Iterable[str]) -> str | None:
    """The first of the globs that fits one of the names; None where none does."""
    names = tuple(names)
    compiled = _compiled(patterns)
    if not any(compiled.match(name) for name in names):  # one pass over a name for all patterns
        return None
    return next(p for p in patterns if any(fnmatchcase(name, p) for name in names))


def _may_fit(patterns: Iterable[str], tensors: Iterable[Tensor]) -> bool:
    """True where a glob fits the quantizer of such a tensor in some module: an end of the glob fits its name."""
    suffixes = [SUFFIXES[tensor] for tensor in tensors]
    return any(fnmatchcase(s, p[start:]) for p in patterns for start in range(len(p)) for s in suffixes)


def _fitting_nothing(patterns: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    return [pattern for pattern in patterns if not any(map(_compiled((pattern,)).match, names))]


def _no_module(patterns: Iterable[str]) -> list[str]:
    return [f"pattern {pattern!r} matches no module" for pattern in patterns]


def _no_class(classes: Iterable[str], known: Known) -> list[str]:
    return [f"no module is of the class {name!r}" for name in classes if name not in known.classes]


@lru_cache(maxsize=4096)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))
