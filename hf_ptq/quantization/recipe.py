"""Recipes: ordered rules that give number formats to modules, and one calibration algorithm.

A recipe is a YAML file:

    description: NVFP4 experts, everything else as it is
    rules:                                   # the last rule that matches decides
      - {pattern: "*.experts.*", weight: nvfp4, input: nvfp4}
      - {import: default_disabled}           # the rules of another file, at this place
      - {pattern: "*.layers.0.*", enable: false}
    algorithm: max
    kv_cache: fp8_cast                       # optional; --kv_cache_qformat wins

`pattern` is a case-sensitive glob (or a list of globs) on the names of modules, in the checkpoint's naming or in the
model's own; `parent_class` narrows a rule to modules of these classes. A rule gives formats to `weight` and `input`
(one that is not named stays unquantized), to the attention's `k` and `v`, or turns modules off. `optional: true`
means that it is no news if a pattern matches nothing. Multi-head latent attention caches the normalised latent and
the rotary key, and servers scale both with `k_scale`: `mla: latent`, the default, calibrates these; `mla: expanded`
calibrates the keys and values that are computed from them, as the peer does.

A preset (`--qformat`) is such a file in `hf_ptq/recipes/presets`; KV presets are in `recipes/kv`, shared rules in
`recipes/units`. This module knows names and structure only; it imports no torch, so that a refusal costs nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from hf_ptq.errors import Problem, UserError
from hf_ptq.quantization.formats.description import Role, formats_for, plain_formats_for

Model = TypeVar("Model", bound=BaseModel)

RECIPES_DIR = Path(__file__).resolve().parent.parent / "recipes"
ROLE_OF_FIELD: dict[str, Role] = {"weight": "weight", "input": "input", "k": "kv", "v": "kv"}
# Names that users know from the peer, refused by that name until they are built.
NOT_BUILT_YET: dict[str, str] = {
    **dict.fromkeys(("int4_awq", "w4a8_awq_beta", "nvfp4_awq_lite", "nvfp4_awq_clip", "nvfp4_awq_full"), "AWQ"),
    **dict.fromkeys(("int8_smoothquant",), "SmoothQuant"),
    **dict.fromkeys(("nvfp4_svdquant",), "SVDQuant"),
    **dict.fromkeys(("nvfp4_four_over_six", "nvfp4_w4a4_weight_mse_fp8_sweep"), "the MSE search"),
    **dict.fromkeys(("nvfp4_w4a4_weight_local_hessian",), "the local Hessian search"),
    **dict.fromkeys(
        (
            "int8",
            "int4_blockwise_weight_only",
            "fp8_2d_blockwise_weight_only",
            "mxfp4",
            "mxfp6",
            "mxfp8",
            "mxint8",
            "mxfp4_mlp_weight_only",
            "w4a8_mxfp4_fp8",
            "w4a8_nvfp4_fp8",
            "nvfp4_mlp_weight_only",
        ),
        "its number format",
    ),
    **dict.fromkeys(
        (
            "nvfp4_omlp_only",
            "nvfp4_fp8_mha",
            "mamba_moe_fp8_aggressive",
            "mamba_moe_fp8_conservative",
            "mamba_moe_nvfp4_aggressive",
            "mamba_moe_nvfp4_conservative",
        ),
        "its recipe",
    ),
}
DEFAULT_KV = "fp8_cast"
KV_NOT_BUILT_YET = ("fp8_affine", "nvfp4_affine", "nvfp4_rotate")


class Rule(BaseModel):
    """One rule of a recipe; see the module docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: tuple[str, ...]
    parent_class: tuple[str, ...] = ()
    weight: str | None = None
    input: str | None = None
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
    def _known_format(cls, value: str | None, info: Any) -> str | None:
        if value is not None:
            choices = plain_formats_for if _is_plain(info) else formats_for
            known = choices(ROLE_OF_FIELD[info.field_name])
            if value not in known:
                raise ValueError(f"unknown format {value!r}; formats for {info.field_name} are {', '.join(known)}")
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
    def decides_linears(self) -> bool:
        """True where the rule decides about weight and input."""
        return not self.enable or self.weight is not None or self.input is not None


def _is_plain(info: ValidationInfo) -> bool:
    """Whether a rule is read for a model that no server is to load."""
    return bool(info.context)


class _File(BaseModel):
    """A recipe file as written: rules may import other files."""

    model_config = ConfigDict(extra="forbid")

    description: str = ""
    rules: list[dict[str, Any]] = Field(default_factory=list)
    algorithm: Literal["max"] = "max"
    kv_cache: str | None = None


@dataclass(frozen=True)
class Recipe:
    """A validated recipe with its imports in place."""

    name: str
    description: str
    rules: tuple[Rule, ...]
    algorithm: str = "max"
    kv_cache: str | None = None
    origin: str = ""  # the file, for messages

    def as_dict(self) -> dict[str, Any]:
        """Plain data, from which `load_recipe` makes the same recipe."""
        rules = [rule.model_dump(mode="json", exclude_defaults=True) for rule in self.rules]
        told = {"name": self.name, "description": self.description, "algorithm": self.algorithm, "rules": rules}
        return told if self.kv_cache is None else {**told, "kv_cache": self.kv_cache}

    @property
    def decides_kv(self) -> bool:
        """True where a rule gives formats to keys and values."""
        return any(rule.k is not None for rule in self.rules)

    def with_kv(self, asked_for: str | None) -> Recipe:
        """The recipe with the KV preset asked for; else with its own rules or `kv_cache`; else with `fp8_cast`."""
        if asked_for is None and self.decides_kv:
            return self
        own = tuple(rule.model_copy(update={"k": None, "v": None}) for rule in self.rules)
        kept = tuple(rule for rule in own if rule.decides_linears)
        return dataclasses.replace(self, rules=kept + load_kv(asked_for or self.kv_cache or DEFAULT_KV))


def load_recipe(recipe: str | Mapping[str, Any], is_plain: bool = False) -> Recipe:
    """The preset of that name, the recipe file at that path, or a recipe as a mapping.

    `is_plain`: for a model that no server is to load; rules may then give formats to inputs alone, and formats that no
    server reads. Raises `UserError` for an unknown name (nearest names given), for one that is not built yet, and for
    a recipe that does not follow the schema (each wrong key or value named).
    """
    if not isinstance(recipe, str):
        data = dict(recipe)
        return _read(data, Path(str(data.pop("name", "recipe"))), is_plain)
    path = _find(recipe)
    if path is None:
        raise UserError(_unknown(recipe))
    return _read(_read_yaml(path), path, is_plain)


def load_kv(name: str) -> tuple[Rule, ...]:
    """The rules of a KV-cache preset; empty for `none`. Raises `UserError` for an unknown name."""
    if name == "none":
        return ()
    path = RECIPES_DIR / "kv" / f"{name}.yaml"
    if path.is_file() and Path(name).name == name:
        return _read(_read_yaml(path), path).rules
    names = [preset for preset, _ in list_kv_presets()]
    if name in KV_NOT_BUILT_YET:
        raise UserError(Problem(f"--kv_cache_qformat {name} is not built yet", f"use one of {', '.join(names)}"))
    near = difflib.get_close_matches(name, names, 3, 0.4)
    raise UserError(Problem(f"--kv_cache_qformat {name!r} is not known", f"nearest: {', '.join(near or names)}"))


def list_presets() -> list[tuple[str, str]]:
    """(name, description) of every preset that `--qformat` takes."""
    return _list("presets")


def list_kv_presets() -> list[tuple[str, str]]:
    """(name, description) of every preset that `--kv_cache_qformat` takes."""
    return [("none", "The KV cache stays in the model's dtype"), *_list("kv")]


def _list(folder: str) -> list[tuple[str, str]]:
    found = []
    for path in sorted((RECIPES_DIR / folder).glob("*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        found.append((path.stem, first.removeprefix("description:").strip()))
    return found


def _find(name_or_path: str) -> Path | None:
    """A preset's file, or the user's own; None where there is neither."""
    if Path(name_or_path).name == name_or_path:
        preset = RECIPES_DIR / "presets" / f"{name_or_path}.yaml"
        if preset.is_file():
            return preset
    path = Path(name_or_path).expanduser()
    return path if path.is_file() else None


def _unknown(name: str) -> Problem:
    names = [preset for preset, _ in list_presets()]
    if name in NOT_BUILT_YET:
        return Problem(
            f"--qformat {name} is not built yet ({NOT_BUILT_YET[name]} is missing)", f"use one of {', '.join(names)}"
        )
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Problem(
            f"--recipe {name}: there is no such file", "give the path of a YAML recipe or the name of a preset"
        )
    near = difflib.get_close_matches(name, names, 3, 0.4)
    return Problem(f"{name!r} is no preset (--qformat)", f"nearest: {', '.join(near or names)}; --list shows all")


def _read(data: Mapping[str, Any], path: Path, is_plain: bool = False) -> Recipe:
    """A recipe that was found at `path`."""
    problems: list[Problem] = []
    file = _validate(_File, data, str(path), problems)
    rules = [] if file is None else _expand(file.rules, (path.resolve(),), problems, is_plain)
    if problems or file is None:
        raise UserError(*problems)
    if not rules:
        raise UserError(Problem(f"{path}: the recipe has no rules", "add rules that give formats to modules"))
    if file.kv_cache is not None:
        load_kv(file.kv_cache)  # an unknown name is refused now
    return Recipe(path.stem, file.description, tuple(rules), file.algorithm, file.kv_cache, str(path))


def _expand(
    items: list[dict[str, Any]], chain: tuple[Path, ...], problems: list[Problem], is_plain: bool
) -> list[Rule]:
    """The rules of a file, the last of `chain`, with imports replaced by the rules that they name."""
    rules: list[Rule] = []
    path = chain[-1]
    for i, item in enumerate(items):
        where = f"{path}: rules[{i}]"
        if set(item) != {"import"}:
            rule = _validate(Rule, item, where, problems, is_plain)
            rules += [rule] if rule is not None else []
            continue
        target = _import_path(str(item["import"]), path)
        if target is None or target in chain:
            reason = "there is no such file" if target is None else "the files import each other"
            cure = "import a file of recipes/units by name or another file by its path"
            problems.append(Problem(f"{where}: import {item['import']!r}: {reason}", cure))
            continue
        imported = _validate(_File, _read_yaml(target), str(target), problems)
        rules += _expand(imported.rules if imported else [], (*chain, target), problems, is_plain)
    return rules


def _import_path(name: str, importer: Path) -> Path | None:
    candidates = (importer.parent / name, importer.parent / f"{name}.yaml", RECIPES_DIR / "units" / f"{name}.yaml")
    return next((p.resolve() for p in candidates if p.is_file()), None)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(Problem(f"{path} is not valid YAML: {' '.join(str(error).split())}")) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(Problem(f"{path} cannot be read as text: {error}", "give a YAML file in UTF-8")) from error
    if not isinstance(data, dict):
        raise UserError(Problem(f"{path}: a recipe is a mapping with the keys description, rules, algorithm, kv_cache"))
    return data


def _validate(
    model: type[Model], data: Any, where: str, problems: list[Problem], is_plain: bool = False
) -> Model | None:
    """`data` as a `model`; what is wrong is appended to `problems`, one entry per key."""
    try:
        return model.model_validate(data, context=is_plain)
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            known = ", ".join(model.model_fields)
            if item["type"] == "extra_forbidden":
                near = difflib.get_close_matches(key, model.model_fields, 1)
                problems.append(
                    Problem(
                        f"{where}: unknown key {key!r}",
                        (f"did you mean {near[0]!r}? " if near else "") + f"known keys: {known}",
                    )
                )
            else:
                problems.append(
                    Problem(f"{where}: {key + ': ' if key else ''}{item['msg'].removeprefix('Value error, ')}")
                )
        return None
