"""What a recipe and the options say of keys and values together: nothing of it is dropped without a word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from hf_ptq.config import EXPORT_FORMATS, RunConfig
from hf_ptq.errors import UserError
from hf_ptq.planning import read_recipe
from hf_ptq.preflight import preflight
from hf_ptq.quantization.plain import assign_plain
from hf_ptq.quantization.recipe import Rule, list_models, list_presets, load_recipe
from hf_ptq.report import Report

LINEARS = '  - {pattern: "*", weight: fp8, input: fp8}\n'
OURS = f'rules:\n{LINEARS}  - {{pattern: "*.self_attn", k: nvfp4, v: nvfp4}}\n'
MODELOPTS = """metadata: {recipe_type: ptq}
quantize:
  quant_cfg:
    - {quantizer_name: "*", enable: false}
    - {quantizer_name: "*weight_quantizer", cfg: {num_bits: e4m3}}
"""
FP8_BMM = '    - {quantizer_name: "*[kv]_bmm_quantizer", cfg: {num_bits: e4m3}}\n'


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def put(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return put


def refusal(recipe: str, word: str | None) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as caught:
        load_recipe(recipe).with_kv(word)
    return [(problem.what, problem.cure) for problem in caught.value.problems]


def formats(recipe: str, word: str | None) -> list[tuple[str, str]]:
    """(k, v) of the rules that give them formats."""
    return [(rule.k, rule.v) for rule in load_recipe(recipe).with_kv(word).rules if "k" in rule.speaks_of]


@pytest.mark.parametrize("word", ["none", "fp8", "fp8_cast"])
def test_an_option_that_contradicts_the_rules_of_a_users_file_is_refused(word: str, write: Callable) -> None:
    path = write(OURS)
    assert refusal(path, word) == [
        (
            f"--kv_cache_qformat {word} contradicts {path}, whose rules say: '*.self_attn': k nvfp4, v nvfp4",
            "leave --kv_cache_qformat out, or take k and v of these rules out of the file",
        )
    ]
    assert formats(path, None) == [("nvfp4", "nvfp4")], "no option is none that was given"
    assert formats(path, "nvfp4") == [("nvfp4", "nvfp4")], "nothing is contradicted"


def test_a_rule_of_linears_and_of_keys_is_named_too(write: Callable) -> None:
    path = write('rules:\n  - {pattern: "*", weight: fp8, k: fp8, v: fp8, mla: expanded}\n')
    assert "'*': k fp8, v fp8, mla expanded" in refusal(path, "none")[0][0]
    assert "'*': k fp8, v fp8, mla expanded" in refusal(path, "fp8")[0][0], "the preset is about the latent"


@pytest.mark.parametrize("word", ["fp8", "none"])
def test_kv_cache_beside_rules_that_say_otherwise_is_refused(word: str, write: Callable) -> None:
    path = write(f"{OURS}kv_cache: {word}\n")
    told = (
        f"{path}: kv_cache: {word} contradicts the rules, which say: '*.self_attn': k nvfp4, v nvfp4",
        "take kv_cache out, or k and v of these rules",
    )
    assert refusal(path, None) == [told]
    assert [what.partition(" contradicts")[0] for what, _ in refusal(path, "fp8_cast")] == [
        "--kv_cache_qformat fp8_cast",
        f"{path}: kv_cache: {word}",
    ]


def test_kv_cache_beside_rules_that_say_the_same(write: Callable) -> None:
    path = write(f"{OURS}kv_cache: nvfp4\n")
    recipe = load_recipe(path).with_kv(None)
    assert [rule.k for rule in recipe.rules] == [None, "nvfp4"]
    assert recipe.notes == ()


@pytest.mark.parametrize(
    ("entry", "words", "said"),
    [
        (FP8_BMM, ("none", "nvfp4", "fp8_cast"), "'*[kv]_bmm_quantizer': k fp8, v fp8"),
        (FP8_BMM.replace("e4m3", "3"), ("none", "fp8"), "'*[kv]_bmm_quantizer': k there is no format"),
        (FP8_BMM.replace("[kv]", "q"), ("none", "fp8"), "'*q_bmm_quantizer': q no server reads"),
    ],
)
def test_entries_of_modelopts_that_name_attention(entry: str, words: tuple, said: str, write: Callable) -> None:
    path = write(MODELOPTS + entry)
    for word in words:
        ((what, cure),) = refusal(path, word)
        assert f"--kv_cache_qformat {word} contradicts {path}" in what
        assert said in what
        assert cure == "leave --kv_cache_qformat out, or take these entries out of the file"


def test_entries_of_modelopts_that_say_the_same_or_name_no_attention(write: Callable) -> None:
    path = write(MODELOPTS)
    assert [rule.k for rule in load_recipe(path).with_kv("fp8").rules[-1:]] == ["fp8"]
    path = write(MODELOPTS + FP8_BMM)
    assert load_recipe(path).with_kv("fp8").notes == ()
    path = write(MODELOPTS + FP8_BMM.replace("cfg: {num_bits: e4m3}", "enable: false"))
    assert load_recipe(path).with_kv("none").notes == ()


@pytest.mark.parametrize("kv", ["nvfp4", "none", "{quant_cfg: [{quantizer_name: '*_bmm_quantizer', enable: false}]}"])
def test_kv_cache_of_modelopts_beside_entries_that_say_otherwise(kv: str, write: Callable) -> None:
    path = write(f"{MODELOPTS}{FP8_BMM}  kv_cache: {kv}\n")
    with pytest.raises(UserError, match=r"kv_cache.* contradicts .*'\*\[kv\]_bmm_quantizer': k fp8, v fp8"):
        load_recipe(path).with_kv(None)


def test_entries_that_only_turn_off_give_way_with_a_word(write: Callable) -> None:
    """As `kv_cache: none` does. Neighbours that turn off alike are one rule; the pattern that names keys is told."""
    off = FP8_BMM.replace("cfg: {num_bits: e4m3}", "enable: false")
    path = write(MODELOPTS + off.replace("*[kv]_bmm_quantizer", "*lm_head*") + off)
    recipe = load_recipe(path).with_kv("fp8")
    told = "gave way to --kv_cache_qformat fp8: '*[kv]_bmm_quantizer': k off, v off"
    assert recipe.notes == (f"recipe mine: its rules for keys and values {told}",)
    assert recipe.rules[-1] == Rule(pattern=("*",), k="fp8", v="fp8")
    assert load_recipe(write(f"{MODELOPTS}{off}kv_cache: fp8\n")).with_kv(None).notes == ()


def test_a_shipped_recipe_gives_way_with_a_word(write: Callable) -> None:
    recipe = load_recipe("nvfp4_fp8_mha").with_kv("none")
    assert not any("k" in rule.speaks_of for rule in recipe.rules)
    assert recipe.notes == (
        "recipe nvfp4_fp8_mha: its rules for keys and values gave way to --kv_cache_qformat none: '*': k fp8, v fp8",
    )
    assert load_recipe("nvfp4_fp8_mha").with_kv("fp8").notes == ()
    assert load_recipe("nvfp4_fp8_mha").with_kv(None).notes == ()


@pytest.mark.parametrize(("own", "word"), [("fp8", "none"), ("none", "fp8_cast")])
def test_the_option_wins_over_kv_cache_with_a_word(own: str, word: str, write: Callable) -> None:
    path = write(f"rules:\n{LINEARS}kv_cache: {own}\n")
    recipe = load_recipe(path).with_kv(word)
    assert recipe.notes == (f"recipe mine: its kv_cache: {own} gave way to --kv_cache_qformat {word}",)
    assert load_recipe(path).with_kv(own).notes == ()
    assert load_recipe(path).with_kv(None).notes == ()
    assert recipe.with_kv(None).notes == recipe.notes, "asked twice, told once"
    assert load_recipe(recipe.as_dict()).rules == recipe.rules


def test_what_gave_way_is_a_warning_of_the_run(tiny: Callable, quantize: Callable) -> None:
    report = Report(Console(quiet=True), verbose=False)
    quantize(tiny("llama"), "nvfp4_fp8_mha", kv_cache_qformat="none", dry_run=True, report=report)
    assert [warning for warning in report.warnings if "gave way" in warning] == [
        "recipe nvfp4_fp8_mha: its rules for keys and values gave way to --kv_cache_qformat none: '*': k fp8, v fp8",
    ]
    assert report.as_dict()["kv_cache"] is None


def test_the_request_is_refused_before_the_run(write: Callable, tmp_path: Path) -> None:
    path = write(OURS)
    config = RunConfig("demo", tmp_path / "out", recipe=path, kv_cache_qformat="none", device="cpu")
    with pytest.raises(UserError, match=r"--kv_cache_qformat none contradicts .*mine\.yaml"):
        preflight(config)
    with pytest.raises(UserError, match=r"--kv_cache_qformat none contradicts .*mine\.yaml"):
        read_recipe(config)
    wrong = RunConfig("demo", tmp_path / "out", recipe=path, kv_cache_qformat="fp9", device="cpu")
    with pytest.raises(UserError) as caught:
        preflight(wrong)
    assert [problem.what for problem in caught.value.problems] == ["--kv_cache_qformat 'fp9' is not known"]


# ---- keys and values alone


@pytest.mark.parametrize("layout", EXPORT_FORMATS)
@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('rules:\n  - {pattern: "*", k: fp8, v: fp8}\n', "'*': k fp8, v fp8"),
        (MODELOPTS.replace("num_bits: e4m3}", "num_bits: e4m3}, enable: false") + FP8_BMM, "'*[kv]_bmm_quantizer': k"),
    ],
)
def test_a_cache_alone_is_refused(
    text: str, rule: str, layout: str, write: Callable, tiny: Callable, quantize: Callable
) -> None:
    with pytest.raises(UserError) as caught:
        quantize(tiny("llama"), recipe=write(text), export_fmt=layout, dry_run=True)
    (problem,) = caught.value.problems
    assert problem.what.startswith(f"recipe mine gives no weight a format, only keys and values: {rule}")
    assert problem.cure == (
        "servers know a checkpoint by the format of its weights: give some weights one, or serve the model as it is "
        "with an FP8 cache (vllm serve MODEL --kv-cache-dtype fp8), which needs no export"
    )


@pytest.mark.parametrize(
    "text",
    [
        'rules:\n  - {pattern: "*expertz*", weight: fp8}\n  - {pattern: "*", k: fp8, v: fp8}\n',
        f'rules:\n{LINEARS}  - {{pattern: "*", enable: false}}\nkv_cache: nvfp4_cast\n',
        MODELOPTS.replace("*weight", "*expertz*weight") + FP8_BMM,
        MODELOPTS + FP8_BMM + '    - {quantizer_name: "*weight_quantizer", enable: false}\n',
    ],
)
def test_rules_for_weights_that_come_to_nothing_are_told_as_such(
    text: str, write: Callable, tiny: Callable, quantize: Callable
) -> None:
    with pytest.raises(UserError, match="recipe mine quantizes nothing in LlamaForCausalLM"):
        quantize(tiny("llama"), recipe=write(text), dry_run=True)


# ---- rules that turn modules off


KV = '  - {pattern: "*", k: fp8_cast, v: fp8_cast}\n'


@pytest.fixture
def cache_of(write: Callable, tiny: Callable, quantize: Callable) -> Callable[..., tuple[dict | None, list[str]]]:
    """What the report says of the cache of a model of three layers, and the warnings about attention."""

    def get(text: str, **options: object) -> tuple[dict | None, list[str]]:
        report = Report(Console(quiet=True), verbose=False)
        quantize(tiny("llama"), recipe=write(text), dry_run=True, report=report, **options)
        return report.as_dict()["kv_cache"], [line for line in report.warnings if "attention" in line]

    return get


@pytest.mark.parametrize(
    ("off", "named"),
    [
        ('"*self_attn*"', "'*self_attn*'"),
        ('["*.layers.0.self_*", "*.layers.[12].self_*"]', "'*.layers.0.self_*' and '*.layers.[12].self_*'"),
    ],
)
def test_a_last_rule_that_turns_attention_off_turns_the_cache_off(off: str, named: str, cache_of: Callable) -> None:
    off_rule = f"  - {{pattern: {off}, enable: false}}\n"
    kv, warnings = cache_of(f"rules:\n{LINEARS}{KV}{off_rule}")
    assert kv is None
    assert (
        f"all attention modules are turned off after the rules for k and v, by {named}: keys and values stay as they "
        "are; put the rule for k and v last to quantize them"
    ) in warnings
    kv, _ = cache_of(f"rules:\n{LINEARS}{off_rule}{KV}")
    assert kv is not None
    kv, _ = cache_of(f"rules:\n{LINEARS}{off_rule}kv_cache: fp8\n")
    assert kv is not None, "what a file's kv_cache gives comes last"
    kv, _ = cache_of(f"rules:\n{LINEARS}{KV}{off_rule}", kv_cache_qformat="fp8_cast")
    assert kv is not None, "and so does the option's"


def test_a_rule_that_turns_some_layers_off_leaves_their_cache(cache_of: Callable) -> None:
    kv, warnings = cache_of(f'rules:\n{LINEARS}{KV}  - {{pattern: "*.layers.-1.*", enable: false}}\n')
    assert kv is not None
    assert kv["layers"] == 3
    assert warnings == [
        "1 of 3 attention modules (model.layers.2.self_attn) are turned off after the rules for k and v, by "
        "'*.layers.-1.*': servers have one format for all layers, so the cache is quantized there too; the rule for k "
        "and v may be last"
    ]


def test_the_pattern_of_keys_counts_layers_from_the_end_too(cache_of: Callable) -> None:
    kv, warnings = cache_of(f'rules:\n{LINEARS}  - {{pattern: ["*.-1.*", "*.-2.*", "*.0.*"], k: fp8, v: fp8}}\n')
    assert kv is not None
    assert warnings == []


def test_linears_of_attention_are_turned_off_by_themselves(cache_of: Callable) -> None:
    for rule in ('{pattern: "*.self_attn.*", enable: false}', "{import: default_disabled}"):
        kv, warnings = cache_of(f"rules:\n{LINEARS}{KV}  - {rule}\n")
        assert kv is not None
        assert warnings == []


def test_attention_that_is_turned_on_again_keeps_its_cache(cache_of: Callable) -> None:
    kv, warnings = cache_of(f'rules:\n{LINEARS}{KV}  - {{pattern: "*self_attn*", enable: false}}\n{LINEARS}')
    assert kv is not None
    assert warnings == []


def test_entries_of_modelopts_turn_the_cache_of_all_layers_off_or_are_refused(cache_of: Callable) -> None:
    base = f"{MODELOPTS}{FP8_BMM}".replace("*weight_quantizer", "*_proj.[wi]*_quantizer")
    kv, warnings = cache_of(f'{base}    - {{quantizer_name: "*[kv]_bmm_quantizer", enable: false}}\n')
    assert (kv, warnings) == (None, [])
    linears = [f'    - {{quantizer_name: "*self_attn*{of}_quantizer", enable: false}}\n' for of in ("weight", "input")]
    kv, warnings = cache_of(base + "".join(linears))
    assert kv is not None, "an entry is about the tensors that it names"
    assert warnings == []
    with pytest.raises(UserError) as caught:
        cache_of(f'{base}    - {{quantizer_name: "*layers.1.*", enable: false}}\n')
    (problem,) = caught.value.problems
    assert problem.what == (
        "servers have one format for the KV cache of all layers, the recipe gives 2 of them fp8 "
        "(model.layers.0.self_attn ...) and 1 none (model.layers.1.self_attn, by *layers.1.*)"
    )
    assert problem.cure == "put the entry for keys and values (*[kv]_bmm_quantizer) last"
    with pytest.raises(UserError) as caught:
        cache_of(f'rules:\n{LINEARS}  - {{pattern: "*.0.self_attn", k: fp8, v: fp8}}\n')
    (problem,) = caught.value.problems
    assert problem.what == (
        "servers have one format for the KV cache of all layers, the recipe gives 1 of them fp8 "
        "(model.layers.0.self_attn) and 2 none (model.layers.1.self_attn ...)"
    )
    assert problem.cure == "give k and v rules a pattern that matches every attention module, such as '*'"


# ---- imports


def test_what_an_import_leaves_behind_is_told(write: Callable, tmp_path: Path) -> None:
    """It brings rules only."""
    (tmp_path / "inner.yaml").write_text(f"rules:\n{LINEARS}algorithm: mse\nkv_cache: none\n")
    path = write("rules:\n  - {import: inner}\n  - {import: default_disabled}\n")
    told = "of that file has to be said in the importing one to count"
    where = f"{path}: rules[0]: import inner brings rules only"
    assert load_recipe(path).notes == (f"{where}: kv_cache: none {told}", f"{where}: algorithm: mse {told}")
    assert assign_plain(load_recipe(path), nn.Sequential(nn.Linear(16, 16)))[1][:2] == list(load_recipe(path).notes)
    path = write("rules:\n  - {import: inner}\nalgorithm: mse\nkv_cache: none\n")
    assert load_recipe(path).notes == (), "it is said"
    path = write("rules:\n  - {import: inner}\nalgorithm: {method: mse, step_size: 0.2}\nkv_cache: fp8\n")
    assert load_recipe(path).notes == (), "something else is said"
    path = write(f"rules:\n  - {{import: inner}}\n{KV}algorithm: max\n")
    assert load_recipe(path).notes == (), "and so it is by rules"
    for name, _ in (*list_presets(), *list_models()):
        assert load_recipe(name).notes == ()
