"""Recipes: ordered rules that give number formats to modules, and one calibration algorithm.

A recipe is a YAML file:

    description: NVFP4 experts, everything else as it is
    rules:                                   # the last rule that matches decides
      - {pattern: "*.experts.*", weight: nvfp4, input: nvfp4}
      - {import: default_disabled}           # the rules of another file or preset, at this place
      - {pattern: "*.layers.0.*", enable: false}
    algorithm: max                           # or mse, {method: mse, fp8_scale_sweep: true}: see algorithm.py
    kv_cache: fp8_cast                       # optional, for rules without k and v; --kv_cache_qformat wins

`pattern` is a case-sensitive glob (or a list of globs) on the names of modules, in the checkpoint's naming or in the
model's own; layers can be counted from the end (`*.layers.-1.*` is the last). `parent_class` narrows a rule to modules
of these classes. A rule gives formats to `weight` and `input` (one that is not named stays unquantized), to the
attention's `k` and `v`, or turns modules off. `optional: true` means that it is no news if a pattern matches nothing.
Multi-head latent attention caches the normalised latent and the rotary key, and servers scale both with `k_scale`:
`mla: latent`, the default, calibrates these; `mla: expanded` calibrates the keys and values that are computed from
them, as the peer does.

A preset is such a file in `hf_ptq/recipes/presets`, a model recipe one in `recipes/models`; `--qformat` and `--recipe`
take the name of either or the path of a file, and the paths of those recipes in ModelOpt's library that are presets
here (general/ptq/nvfp4_default-kv_fp8). KV presets are in `recipes/kv`, shared rules in `recipes/units`. Files of
ModelOpt's are read as they are (modelopt_recipe.py). This module knows names and structure only; it imports no torch,
so that a refusal costs nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from hf_ptq.errors import Problem, UserError, refuse_if_any
from hf_ptq.quantization.algorithm import AlgorithmSpec, Max, read_algorithm
from hf_ptq.quantization.contradictions import says_otherwise
from hf_ptq.quantization.modelopt_recipe import CACHES, GENERAL, PRESETS, SHIPPED, is_modelopt, preset_of, read_modelopt
from hf_ptq.quantization.rules import OF_QUANTIZERS, AnyRule, Rule, quantizer_rule
from hf_ptq.quantization.yaml_files import read_documents, validated

RECIPES_DIR = Path(__file__).resolve().parent.parent / "recipes"
NAMED = ("presets", "models")  # folders whose files are known by their names
# Names that users know from the peer, refused by that name until they are built.
NOT_BUILT_YET: dict[str, str] = {
    **dict.fromkeys(("int4_awq", "w4a8_awq_beta", "nvfp4_awq_lite", "nvfp4_awq_clip", "nvfp4_awq_full"), "AWQ"),
    "int8_smoothquant": "SmoothQuant",
    "nvfp4_svdquant": "SVDQuant",
    "nvfp4_w4a4_weight_local_hessian": "the local Hessian search",
}
DEFAULT_KV = "fp8_cast"


class _File(BaseModel):
    """A recipe file as written: rules may import other files."""

    model_config = ConfigDict(extra="forbid")

    description: str = ""
    rules: list[dict[str, Any]] = Field(default_factory=list)
    algorithm: AlgorithmSpec = Max()
    kv_cache: str | None = None

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm(cls, value: Any) -> AlgorithmSpec:
        return read_algorithm(value)


@dataclass(frozen=True)
class Recipe:
    """A validated recipe with its imports in place.

    `says_all`: where no rule speaks of keys and values they stay as they are, as in ModelOpt's files; else the default
    preset for them is added. `notes`: what of it is not carried out, for the
    report: it gave way to an option, or stands in an imported file beside the rules.
    """

    name: str
    description: str
    rules: tuple[AnyRule, ...]
    algorithm: AlgorithmSpec = field(default_factory=Max)
    kv_cache: str | None = None
    origin: str = ""  # the file, for messages
    says_all: bool = False
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, from which `load_recipe` makes the same recipe."""
        told = {"name": self.name, "description": self.description, "algorithm": self.algorithm.model_dump(mode="json")}
        told["rules"] = [rule.as_dict() for rule in self.rules]
        return told if self.kv_cache is None else {**told, "kv_cache": self.kv_cache}

    @property
    def decides_kv(self) -> bool:
        """True where the rules are the whole truth about keys and values."""
        return self.kv_cache is None and (self.says_all or any("k" in rule.speaks_of for rule in self.rules))

    def with_kv(self, asked_for: str | None) -> Recipe:
        """The recipe with the KV preset asked for; else with its `kv_cache` or its own rules; else with `fp8_cast`.

        Raises UserError where rules of a user's own that give keys and values a format would be dropped. A recipe that
        ships gives way, and so do rules that only turn off, and a file's `kv_cache`, with a note.
        """
        if asked_for is None and self.decides_kv:
            return self
        refuse_if_any(self._contradictions(asked_for))
        wanted = asked_for if asked_for is not None else self.kv_cache or DEFAULT_KV
        own = tuple(kept for rule in self.rules if (kept := rule.without_cache()) is not None)
        return dataclasses.replace(
            self,
            rules=own + load_kv(wanted),
            kv_cache=None if self.kv_cache is None else wanted,
            notes=(*self.notes, *self._gives_way(asked_for)),
        )

    @property
    def _is_shipped(self) -> bool:
        return RECIPES_DIR in Path(self.origin).parents

    def _contradictions(self, asked_for: str | None) -> Iterator[Problem]:
        file, parts = self.origin or self.name, "these entries" if self.says_all else "k and v of these rules"
        said = says_otherwise(self.rules, load_kv(asked_for)) if asked_for is not None else ""
        if said and not self._is_shipped:
            what = f"--kv_cache_qformat {asked_for} contradicts {file}, whose rules say: {said}"
            yield Problem(what, f"leave --kv_cache_qformat out, or take {parts} out of the file")
        said = says_otherwise(self.rules, load_kv(self.kv_cache)) if self.kv_cache is not None else ""
        if said:
            what = f"{file}: kv_cache: {self.kv_cache} contradicts the rules, which say: {said}"
            yield Problem(what, f"take kv_cache out, or {parts}")

    def _gives_way(self, asked_for: str | None) -> Iterator[str]:
        if asked_for is None:
            return
        option = f"gave way to --kv_cache_qformat {asked_for}"
        said = says_otherwise(self.rules, load_kv(asked_for), or_off=True)
        if said:
            yield f"recipe {self.name}: its rules for keys and values {option}: {said}"
        if self.kv_cache not in (None, asked_for):
            yield f"recipe {self.name}: its kv_cache: {self.kv_cache} {option}"


def load_recipe(recipe: str | Mapping[str, Any], is_plain: bool = False) -> Recipe:
    """The preset or model recipe of that name, the recipe at that path (a file, or a directory of ModelOpt's; or in
    ModelOpt's own library, where that recipe is a preset), or one as a mapping.

    `is_plain`: for a model that no server is to load; rules may then give formats to inputs alone, and formats that no
    server reads. Raises `UserError` for an unknown name (nearest names given), for one that is not built yet, and for
    a recipe that does not follow its schema (each wrong key or value named).
    """
    if not isinstance(recipe, str):
        data = dict(recipe)
        return _load(Path(str(data.pop("name", "recipe"))), [data], is_plain)
    path = _find(recipe)
    if path is None and (theirs := preset_of(recipe)) is not None:
        preset, kv = theirs
        name = Path(recipe).name.removesuffix(".yaml").removesuffix(".yml")
        return dataclasses.replace(load_recipe(preset), name=name, kv_cache=kv)
    if path is None:
        raise UserError(_unknown(recipe))
    return _load(path, [] if path.is_dir() else read_documents(path)[0], is_plain)


def load_kv(name: str, where: str = "--kv_cache_qformat") -> tuple[AnyRule, ...]:
    """The rules of a KV-cache preset; empty for `none`. Raises `UserError` for an unknown name, saying `where`."""
    if name == "none":
        return ()
    path = RECIPES_DIR / "kv" / f"{name}.yaml"
    if path.is_file() and Path(name).name == name:
        return _load(path, read_documents(path)[0]).rules
    names = [preset for preset, _ in list_kv_presets()]
    near = difflib.get_close_matches(name, names, 3, 0.4)
    raise UserError(Problem(f"{where} {name!r} is not known", f"nearest: {', '.join(near or names)}"))


def list_presets() -> list[tuple[str, str]]:
    """(name, description) of every preset that `--qformat` takes."""
    return _list("presets")


def list_models() -> list[tuple[str, str]]:
    """(name, description) of every recipe for one model or family; `--recipe` takes them by name."""
    return _list("models")


def list_not_built() -> list[tuple[str, str]]:
    """(name, what is missing) of the presets that users know from the peer and that are refused."""
    return [(name, f"not built yet: {missing} is missing") for name, missing in sorted(NOT_BUILT_YET.items())]


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
    """A preset's file, a model recipe's, or the user's own; None where there is none."""
    if Path(name_or_path).name == name_or_path:
        files = (RECIPES_DIR / folder / f"{name_or_path}.yaml" for folder in NAMED)
        shipped = next((file for file in files if file.is_file()), None)
        if shipped is not None:
            return shipped
    path = Path(name_or_path).expanduser()
    return path if path.is_file() or (path.is_dir() and name_or_path) else None


def _unknown(name: str) -> Problem:
    presets = [preset for preset, _ in list_presets()]
    if name in NOT_BUILT_YET:
        what = f"--qformat {name} is not built yet ({NOT_BUILT_YET[name]} is missing)"
        return Problem(what, f"use one of {', '.join(presets)}")
    if name.startswith(GENERAL):
        what = f"--recipe {name}: there is no such file, nor a preset that is this recipe of ModelOpt's"
        known = f"{SHIPPED} with {', '.join(PRESETS)} and -kv_{', -kv_'.join(CACHES)}"
        cure = "name a preset, as in --qformat nvfp4 with --kv_cache_qformat fp8 (--list shows all)"
        return Problem(what, f"{cure}; known are {known}")
    if "/" in name or name.endswith((".yaml", ".yml")):
        what = f"--recipe {name}: there is no such file"
        return Problem(what, "give the path of a YAML recipe or the name of a preset")
    known = [*presets, *(model for model, _ in list_models()), *NOT_BUILT_YET]
    near = difflib.get_close_matches(name, known, 3, 0.4)
    return Problem(f"{name!r} is no preset (--qformat)", f"nearest: {', '.join(near or presets)}; --list shows all")


def _load(path: Path, documents: list[Any], is_plain: bool = False) -> Recipe:
    """A recipe that was found at `path`."""
    problems: list[Problem] = []
    if path.is_dir() or (documents and is_modelopt(documents[0])):
        recipe = _load_modelopts(path, problems)
    else:
        recipe = _load_ours(path, documents, problems, is_plain)
    if problems or recipe is None:
        raise UserError(*problems)
    if not recipe.rules:
        raise UserError(Problem(f"{path}: the recipe has no rules", "add rules that give formats to modules"))
    if recipe.kv_cache is not None:
        load_kv(recipe.kv_cache, f"{path}: kv_cache")  # an unknown name is refused now
    return recipe


def _load_modelopts(path: Path, problems: list[Problem]) -> Recipe | None:
    read = read_modelopt(path, problems)
    if read is None:
        return None
    return Recipe(path.stem, read.description, read.rules, read.algorithm, read.kv_cache, str(path), says_all=True)


def _load_ours(path: Path, documents: list[Any], problems: list[Problem], is_plain: bool) -> Recipe | None:
    file = _read_file(path, documents, problems)
    if file is None:
        return None
    notes: list[str] = []
    rules = tuple(_expand(file, (path.resolve(),), problems, notes, is_plain))
    notes = [] if problems else list(dict.fromkeys(notes))
    return Recipe(path.stem, file.description, rules, file.algorithm, file.kv_cache, str(path), notes=tuple(notes))


def _read_file(path: Path, documents: list[Any], problems: list[Problem]) -> _File | None:
    if len(documents) != 1 or not isinstance(documents[0], dict):
        keys = ", ".join(_File.model_fields)
        raise UserError(Problem(f"{path}: a recipe is a mapping with the keys {keys}"))
    return validated(_File, documents[0], str(path), problems)


def _expand(
    file: _File, chain: tuple[Path, ...], problems: list[Problem], notes: list[str], is_plain: bool
) -> list[AnyRule]:
    """The rules of a file, the last of `chain`, with imports replaced by the rules that they name.

    `notes` gets what else the imported files say and this one does not.
    """
    rules: list[AnyRule] = []
    path = chain[-1]
    for i, item in enumerate(file.rules):
        where = f"{path}: rules[{i}]"
        if set(item) == {OF_QUANTIZERS}:
            rules.append(quantizer_rule(item))
            continue
        if set(item) != {"import"}:
            rule = validated(Rule, item, where, problems, is_plain)
            rules += [rule] if rule is not None else []
            continue
        target = _import_path(str(item["import"]), path)
        if target is None or target in chain:
            reason = "there is no such file" if target is None else "the files import each other"
            cure = "import a preset or a file of recipes/units by name, or another file by its path"
            problems.append(Problem(f"{where}: import {item['import']!r}: {reason}", cure))
            continue
        imported = _read_file(target, read_documents(target)[0], problems)
        if imported is None:
            continue
        notes += _left_behind(file, imported, f"{where}: import {item['import']}")
        rules += _expand(imported, (*chain, target), problems, notes, is_plain)
    return rules


def _left_behind(file: _File, imported: _File, where: str) -> Iterator[str]:
    """What an imported file says of keys and values, and of the algorithm, where the importing one says nothing."""
    said = file.model_fields_set | ({"kv_cache"} if any("k" in item for item in file.rules) else set())
    left = {} if imported.kv_cache is None or "kv_cache" in said else {"kv_cache": imported.kv_cache}
    if imported.algorithm != Max() and "algorithm" not in said:
        left["algorithm"] = imported.algorithm.method
    for key, value in left.items():
        yield f"{where} brings rules only: {key}: {value} of that file has to be said in the importing one to count"


def _import_path(name: str, importer: Path) -> Path | None:
    """The file that an import means: of a preset's name, in a file of that name, the preset."""
    shipped = (RECIPES_DIR / folder / f"{name}.yaml" for folder in ("units", *NAMED))
    candidates = (importer.parent / name, importer.parent / f"{name}.yaml", *shipped)
    found = [p.resolve() for p in candidates if p.is_file()]
    return next((p for p in found if p != importer), importer if found else None)
