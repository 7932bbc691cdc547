"""The recipe schema: what a file may say, what it is told when it says something else, and what the presets say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ptq.errors import UserError
from hf_ptq.quantization.algorithm import Max
from hf_ptq.quantization.recipe import NOT_BUILT_YET, RECIPES_DIR, Rule, list_models, list_presets, load_kv, load_recipe


def write(path: Path, *rules: str, more: str = "") -> Path:
    path.write_text("\n".join(["rules:", *(f"  - {rule}" for rule in rules), more]))
    return path


def refusal(path: Path | str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(str(path))
    return str(caught.value)


# ---- what is read


def test_rules_in_order_with_imports_in_their_place(tmp_path: Path) -> None:
    write(tmp_path / "inner.yaml", '{pattern: "b", weight: nvfp4}', '{pattern: "c", enable: false}')
    path = write(
        tmp_path / "outer.yaml",
        '{pattern: [a, "a.*"], weight: fp8, input: fp8, parent_class: Linear}',
        "{import: inner.yaml}",
        '{pattern: "d", weight: int8_per_channel, optional: true}',
        more="description: mine\nkv_cache: none",
    )
    recipe = load_recipe(str(path))
    assert recipe.rules == (
        Rule(pattern=("a", "a.*"), parent_class=("Linear",), weight="fp8", input="fp8"),
        Rule(pattern=("b",), weight="nvfp4"),
        Rule(pattern=("c",), enable=False),
        Rule(pattern=("d",), weight="int8_per_channel", optional=True),
    )
    assert (recipe.name, recipe.description, recipe.kv_cache, recipe.algorithm) == ("outer", "mine", "none", Max())
    assert recipe.origin == str(path)


def test_an_import_is_found_beside_the_file_without_its_ending_and_in_the_package(tmp_path: Path) -> None:
    write(tmp_path / "beside.yaml", '{pattern: "b", weight: nvfp4}')
    path = write(tmp_path / "mine.yaml", "{import: beside}", "{import: default_disabled}")
    rules = load_recipe(str(path)).rules
    assert rules[0].pattern == ("b",)
    assert any("*lm_head*" in rule.pattern and not rule.enable for rule in rules[1:])


def test_a_file_beside_wins_over_the_packages(tmp_path: Path) -> None:
    write(tmp_path / "default_disabled.yaml", '{pattern: "only this", enable: false}')
    path = write(tmp_path / "mine.yaml", '{pattern: "*", weight: fp8}', "{import: default_disabled}")
    assert [rule.pattern for rule in load_recipe(str(path)).rules] == [("*",), ("only this",)]


@pytest.mark.parametrize("folder", ["presets", "models"])
def test_shipped_recipes_are_imported_by_name_also_into_a_file_of_that_name(folder: str, tmp_path: Path) -> None:
    shipped = sorted((RECIPES_DIR / folder).glob("*.yaml"))[0].stem
    path = write(tmp_path / f"{shipped}.yaml", f"{{import: {shipped}}}", '{pattern: "own", enable: false}')
    write(tmp_path / "outer.yaml", f"{{import: {shipped}}}")
    for file in (path, tmp_path / "outer.yaml"):
        rules = load_recipe(str(file)).rules
        assert (rules[:-1], rules[-1].pattern) == (load_recipe(shipped).rules, ("own",))


def test_one_file_may_be_imported_twice(tmp_path: Path) -> None:
    write(tmp_path / "inner.yaml", '{pattern: "b", enable: false}')
    path = write(tmp_path / "o.yaml", "{import: inner}", '{pattern: "*", weight: fp8}', "{import: inner}")
    assert [rule.pattern for rule in load_recipe(str(path)).rules] == [("b",), ("*",), ("b",)]


# ---- what is refused


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ('{patern: "*", weight: fp8}', ("rules[0]: unknown key 'patern'", "did you mean 'pattern'?")),
        ('{pattern: "*", wieght: fp8}', ("unknown key 'wieght'", "did you mean 'weight'?")),
        ('{pattern: "*", weight: fp7}', ("rules[0]: weight: unknown format 'fp7'", "fp8, fp8_per_channel, fp8_2d")),
        ('{pattern: "*", weight: fp8_per_token}', ("weight: unknown format 'fp8_per_token'",)),
        ('{pattern: "*", weight: fp8, input: int8_per_channel}', ("input: unknown format 'int8_per_channel'",)),
        ('{pattern: "*", k: fp9, v: fp8_cast}', ("k: unknown format 'fp9'", "fp8_cast")),
        ('{pattern: "*", input: fp8}', ("input without weight",)),
        ('{pattern: "*", weight: fp8, output: fp8}', ("output: no server reads the output of a linear quantized",)),
        ('{pattern: "*", weight: fp8, enable: false}', ("enable: false cannot give formats",)),
        ('{pattern: "*"}', ("a rule gives a format",)),
        ("{pattern: [], weight: fp8}", ("pattern is empty",)),
        ("{weight: fp8}", ("pattern: Field required",)),
        ('{pattern: "*", weight: fp8, enable: perhaps}', ("enable: ",)),
        ('{pattern: "*", weight: 8}', ("weight: ",)),
        ("{import: nowhere}", ("rules[0]: import 'nowhere': there is no such file",)),
    ],
)
def test_a_wrong_rule_is_named(rule: str, named: tuple[str, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", rule)
    said = refusal(path)
    assert str(path) in said
    assert all(text in said for text in named), said


def test_all_wrong_rules_come_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml", '{patern: "*", weight: fp7}', '{pattern: "ok", weight: fp8}', "{import: nowhere}"
    )
    said = refusal(path)
    assert "unknown key 'patern'" in said
    assert "unknown format 'fp7'" in said
    assert "rules[2]: import 'nowhere'" in said
    assert "rules[1]" not in said


def test_a_wrong_key_of_the_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", '{pattern: "*", weight: fp8}', more="algoritm: max")
    assert "unknown key 'algoritm'" in refusal(path)
    assert "did you mean 'algorithm'?" in refusal(path)
    assert "algorithm: " in refusal(write(path, '{pattern: "*", weight: fp8}', more="algorithm: min"))


def test_a_wrong_rule_of_an_imported_file_names_that_file(tmp_path: Path) -> None:
    inner = write(tmp_path / "inner.yaml", '{pattern: "*", weight: fp8}', '{pattern: "*", wait: fp8}')
    said = refusal(write(tmp_path / "outer.yaml", "{import: inner}"))
    assert f"{inner}: rules[1]: unknown key 'wait'" in said


@pytest.mark.parametrize("length", [1, 2, 3])
def test_files_that_import_each_other(length: int, tmp_path: Path) -> None:
    for i in range(length):
        write(tmp_path / f"f{i}.yaml", '{pattern: "*", weight: fp8}', f"{{import: f{(i + 1) % length}}}")
    said = refusal(tmp_path / "f0.yaml")
    assert f"f{length - 1}.yaml: rules[1]: import 'f0': the files import each other" in said


def test_a_circle_is_seen_from_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "own.yaml", '{pattern: "*", weight: fp8}', "{import: own}")
    monkeypatch.chdir(tmp_path)
    said = refusal("./own.yaml")
    assert said.count("the files import each other") == 1


def test_what_an_anchor_merges_in_may_be_said_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        'rules:\n  - &a {pattern: "*q", weight: fp8}\n  - &b {<<: *a, pattern: "*k"}\n  - {<<: *b, weight: nvfp4}\n'
    )
    assert [(r["pattern"], r["weight"]) for r in load_recipe(str(path)).as_dict()["rules"]] == [
        (["*q"], "fp8"), (["*k"], "fp8"), (["*k"], "nvfp4"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rules: [", "is not valid YAML"),
        ("rules: []\nalgorithm: max\nrules: []\n", "the key 'rules' is there twice"),
        ('rules:\n  - {pattern: "*", weight: fp8, weight: nvfp4}\n', "the key 'weight' is there twice"),
        ("- a\n- b\n", "a recipe is a mapping"),
        ("", "a recipe is a mapping"),
        ("description: x\n", "the recipe has no rules"),
        ("rules: 3\n", "rules: "),
        ("rules:\n  - fp8\n", "rules.0: "),
    ],
)
def test_files_that_are_no_recipe(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    said = refusal(path)
    assert str(path) in said
    assert named in said


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert str(path) in refusal(path)


def test_shipped_recipes_by_name_and_files_by_path_are_one_thing(tmp_path: Path) -> None:
    """`--qformat` and `--recipe` take either."""
    by_name = load_recipe("fp8")
    assert load_recipe(str(RECIPES_DIR / "presets" / "fp8.yaml")) == by_name
    for name, _ in list_models():
        assert load_recipe(name) == load_recipe(str(RECIPES_DIR / "models" / f"{name}.yaml"))
    with pytest.raises(UserError, match="nearest: minimax_m2-nvfp4"):
        load_recipe("minimax_m3-nvfp4")


def test_names_that_are_unknown() -> None:
    assert "nearest: nvfp4" in refusal("nvfp5")
    assert "there is no such file" in refusal("no/such/recipe.yaml")
    assert "there is no such file" in refusal("recipe.yml")


@pytest.mark.parametrize("name", sorted(NOT_BUILT_YET))
def test_presets_of_the_peer_that_are_not_built(name: str) -> None:
    said = refusal(name)
    assert f"--qformat {name} is not built yet" in said
    assert "fp8, " in said


def test_a_kv_preset_that_is_unknown() -> None:
    with pytest.raises(UserError, match=r"'fp8_csat' is not known\n.*nearest: fp8_cast"):
        load_kv("fp8_csat")
    with pytest.raises(UserError, match="is not known"):
        load_kv("../presets/fp8")  # a name, not a path


def test_a_kv_preset_of_a_file_is_refused_by_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('rules:\n  - {pattern: "*", weight: fp8}\nkv_cache: fp9\n')
    assert f"{path}: kv_cache 'fp9' is not known" in refusal(path)


# ---- the presets


WEIGHT_AND_INPUT = {
    "fp8": ("fp8", "fp8"),
    "fp8_per_channel_per_token": ("fp8_per_channel", "fp8_per_token"),
    "int8_weight_only": ("int8_per_channel", None),
    "nvfp4": ("nvfp4", "nvfp4"),
    "nvfp4_mlp_only": ("nvfp4", "nvfp4"),
    "w4a16_nvfp4": ("nvfp4", None),
}


@pytest.mark.parametrize("name", WEIGHT_AND_INPUT)
def test_presets_say_what_their_name_says(name: str) -> None:
    recipe = load_recipe(name)
    first, *rest = recipe.rules
    assert (first.weight, first.input) == WEIGHT_AND_INPUT[name]
    assert all(not rule.enable for rule in rest)
    assert (first.pattern == ("*",)) == (name != "nvfp4_mlp_only")


def test_every_preset_is_sound_and_described() -> None:
    presets = dict(list_presets())
    assert presets.keys() >= WEIGHT_AND_INPUT.keys()
    assert set(presets) == {path.stem for path in (RECIPES_DIR / "presets").glob("*.yaml")}
    for name, description in presets.items():
        assert load_recipe(name).description == description
        assert len(description) > 20


def test_recipes_are_read_without_torch() -> None:
    code = (
        "import sys, json; from hf_ptq.quantization.recipe import load_recipe; load_recipe('nvfp4');"
        "print(json.dumps([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
