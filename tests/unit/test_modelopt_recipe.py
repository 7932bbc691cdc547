"""ModelOpt's recipe files: the decisions that ModelOpt makes (recorded beside the files), and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_ptq.checkpoint.source import open_source
from hf_ptq.errors import UserError
from hf_ptq.model.attention import attention_modules
from hf_ptq.model.build import build_meta_model
from hf_ptq.model.views import weight_views
from hf_ptq.quantization.algorithm import Max, Mse
from hf_ptq.quantization.assignment import assign
from hf_ptq.quantization.modelopt_imports import library
from hf_ptq.quantization.numerics import Attributes, meaning, phrase
from hf_ptq.quantization.places import places_of
from hf_ptq.quantization.recipe import Recipe, load_recipe
from hf_ptq.quantization.rules import ATTENTION, LINEAR, Place, settle
from hf_ptq.report import Report

FILES = Path(__file__).resolve().parent.parent / "modelopt_recipes"
RECORDED = json.loads((FILES / "decisions.json").read_text())
E4M3, E2M1 = [4, 3], [2, 1]
# The recorded attributes (num_bits, axis, block_sizes, whether dynamic, whether constant) -> our name.
NAMES: dict[str, str] = {
    json.dumps(key): name
    for key, name in [
        ((E4M3, None, None, False, False), "fp8"),
        ((E4M3, 0, None, False, False), "fp8_per_channel"),
        ((E4M3, None, {"-1": None}, True, False), "fp8_per_token"),
        ((E4M3, None, {"-1": 128, "-2": 128}, False, False), "fp8_2d"),
        ((E4M3, None, {"-1": 32, "scale_bits": [8, 0], "type": "dynamic"}, False, False), "mxfp8"),
        ((E2M1, None, {"-1": 16, "scale_bits": E4M3, "type": "dynamic"}, False, False), "nvfp4"),
        ((E2M1, None, {"-1": 16, "scale_bits": E4M3, "type": "dynamic"}, False, True), "nvfp4_cast"),
        ((8, None, None, False, False), "int8"),
        ((8, 0, None, False, False), "int8_per_channel"),
    ]
}


@pytest.fixture(scope="module")
def planned(tiny: Callable[[str], Path]) -> tuple:
    source = open_source(str(tiny("qwen3_moe")), None, False, Report(verbose=False))
    meta = build_meta_model(source)
    return meta.model, weight_views(meta.placements, source.tensors, meta.stacking)


def our_name(recorded: Any) -> str | None:
    """What a recorded quantizer is called here; None where it is off."""
    if recorded == "off":
        return None
    if isinstance(recorded, list):
        assert [our_name({**part, "block_sizes": None}) for part in recorded[1:]] == ["fp8"]
        assert (recorded[0]["num_bits"], recorded[0]["block_sizes"]) == (4, {"-1": 128, "type": "static"})
        return "int4_block128_fp8"
    keys = ("num_bits", "axis", "block_sizes", "dynamic", "constant")
    return NAMES[json.dumps([recorded[key] for key in keys])]


def our_decisions(recipe: Recipe, model, views) -> dict[str, str | None]:
    """ModelOpt's name of each quantizer (experts together) -> our format. All experts must agree."""
    found: dict[str, set[str | None]] = {}
    modules = dict(model.named_modules())
    for view, places in places_of(views, modules).items():
        for place in places:
            for tensor in LINEAR:
                decision = settle(recipe.rules, tensor, place)
                assert decision.reason is None, decision
                if view.is_stacked:
                    name = {
                        "weight": f"{view.parameter}_weight_quantizers",
                        "input": f"{view.parameter}_input_quantizer",
                    }
                    assert tensor != "output" or decision.format is None
                    key = name.get(tensor)
                else:
                    key = f"{view.parameter.removesuffix('.weight')}.{tensor}_quantizer"
                if key is not None:
                    found.setdefault(key, set()).add(decision.format)
    for name in attention_modules(model):
        for tensor in ATTENTION:
            decision = settle(recipe.rules, tensor, Place((name,)))
            found[f"{name}.{tensor}_bmm_quantizer"] = {decision.format}
    assert all(len(formats) == 1 for formats in found.values())
    return {name: formats.pop() for name, formats in found.items()}


@pytest.mark.parametrize("file", RECORDED)
def test_decisions_are_modelopts(file: str, planned: tuple) -> None:
    theirs = {name: our_name(group["is"]) for group in RECORDED[file] for name in group["quantizers"]}
    recipe = load_recipe(str(FILES / file))
    ours = our_decisions(recipe, *planned)
    routers = {name for name in ours if ".mlp.gate." in name}  # ModelOpt knows no quantizer of a router
    embedding = {name for name in ours if "embed_tokens" in name}
    assert set(theirs) - set(ours) == set()
    assert set(ours) - set(theirs) <= routers
    wrong = {n: (ours[n], theirs[n]) for n in theirs if n not in embedding and ours[n] != theirs[n]}
    assert wrong == {}
    assert len(set(theirs.values())) > 2, "a file that decides little shows little"


def test_a_file_of_modelopts_becomes_an_assignment(planned: tuple) -> None:
    """Of whole modules, with the keys and values that the file gives, and none where it gives none."""
    model, views = planned
    recipe = load_recipe(str(FILES / "experts_nvfp4_attention_fp8.yaml")).with_kv(None)
    found = assign(recipe, model, views)
    kinds = {module: q.scheme for module, q in found.by_module.items()}
    assert {m for m in kinds if ".layers.0." in m} == set()
    assert {s for m, s in kinds.items() if ".experts." in m} == {("nvfp4", "nvfp4")}
    assert {s for m, s in kinds.items() if "self_attn" in m} == {("fp8", "fp8")}
    assert len(kinds) == 2 * (3 * 8 + 4)
    assert found.kv is not None
    assert (found.kv.k.name, found.kv.v.name) == ("fp8", "fp8")
    assert found.warnings == ()
    labels = {q.rule for q in found.quantized}
    assert "*.experts.*weight_quantizer, *.experts.*input_quantizer" in labels
    bare = load_recipe(str(FILES / "nothing_turned_off.yaml"))
    assert assign(bare.with_kv(None), model, views).kv is None
    cast = assign(bare.with_kv("fp8_cast"), model, views).kv
    assert cast is not None
    assert cast.k.name == "fp8_cast"


def test_a_pair_of_formats_that_has_a_name_of_its_own(planned: tuple, tmp_path: Path) -> None:
    """INT4 blocks of 32 NVFP4 values leave room for the FP8 product's scale only where activations are FP8."""
    cfg = '{quantizer_name: "*experts*input_quantizer", cfg: {num_bits: e4m3}}'
    path = entries(tmp_path, OFF, f"{{quantizer_name: '*experts*weight_quantizer', cfg: {BLOCK32}}}", cfg)
    found = assign(load_recipe(str(path)), *planned)
    assert {q.scheme for q in found.quantized} == {("nvfp4_block32_fp8", "fp8")}


# ---- what is refused


OFF = '{quantizer_name: "*", enable: false}'
BLOCK32 = "{num_bits: e2m1, block_sizes: {-1: 32, type: dynamic, scale_bits: e4m3}}"
W8 = '{quantizer_name: "*weight_quantizer", cfg: {num_bits: e4m3}}'


def entries(folder: Path, *lines: str, more: str = "", imports: str = "{}") -> Path:
    path = folder / "mine.yaml"
    listed = "\n".join(f"    - {line}" for line in lines)
    text = f"imports: {imports}\nmetadata: {{recipe_type: ptq}}\nquantize:\n  {more}\n  quant_cfg:\n{listed}\n"
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(str(path))
    assert str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{quantizer_name: x}", "quant_cfg[1]: an entry has cfg, which is not empty, or enable"),
        ("{quantizer_name: x, cfg: {}}", "an entry has cfg, which is not empty, or enable"),
        ("{quantizer_nam: x, enable: true}", "did you mean 'quantizer_name'?"),
        ("{quantizer_name: x, cfg: {num_bit: 8}}", "num_bit"),
        ("{quantizer_name: x, cfg: {num_bits: e9m9}}", "'e9m9' is no number of bits"),
        ("{quantizer_name: x, cfg: {num_bits: e4m3, enable: false}}", "write enable beside quantizer_name"),
        ("{$import: nowhere}", "$import 'nowhere' is not among the imports (none)"),
        ("{quantizer_name: x, cfg: {$import: nowhere}}", "quantize.quant_cfg[1].cfg: $import 'nowhere'"),
        ("3", "quant_cfg[1]"),
    ],
)
def test_a_wrong_entry_is_named(line: str, named: str, tmp_path: Path) -> None:
    said = refusal(entries(tmp_path, OFF, line))
    assert named in said
    assert str(tmp_path / "mine.yaml") in said


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("metadata: {recipe_type: auto_quantize}\nauto_quantize: {}\n", "recipes of the type auto_quantize"),
        ("metadata: {}\nquantize: {}\n", "metadata.recipe_type: Field required"),
        ("metadata: {recipe_type: ptq}\n", "quantize: Field required"),
        ("quant_cfg: [{quantizer_name: x, enable: false}]\nalgorithm: gptq\n", "'gptq' is not built yet"),
        ("quant_cfg: [{quantizer_name: x, enable: false}]\nalgorithm: {method: max, q: 1}\n", "its settings are"),
        ("imports: [a]\nquant_cfg: []\n", "imports is no mapping"),
        ("imports: {a: nowhere}\nquant_cfg: []\n", "imports.a: nowhere: there is no such file"),
        ("imports: {a: mine.yaml}\nquant_cfg: []\n", "the files import each other"),
        ("imports: {a: bare.yaml}\nquant_cfg: []\n", "the file says 0 times what it is"),
        ("imports: {a: configs/numerics/fp8}\n---\na: 1\n---\nb: 1\n", "3 documents"),
        ("imports: {a: configs/numerics/fp8}\n---\n- {$import: a}\n", "a list is no recipe"),
        ("imports: {a: configs/ptq/units/kv_fp8}\nquant_cfg: []\nquantize: {$import: a}\n", "cannot be merged"),
        ("quant_cfg: []\nkv_cache: 8\n", "kv_cache is neither a name nor a mapping"),
        ("quant_cfg: []\nkv_cache: fp9\n", "'fp9' is not known"),
    ],
)
def test_files_that_are_no_recipe_of_modelopts(text: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("num_bits: 8\n")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert named in refusal(path)


def test_a_directory_without_its_files(tmp_path: Path) -> None:
    assert "there is no metadata.yml and no quantize.yml" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{quantizer_name: "*o_proj.output_quantizer", cfg: {num_bits: e4m3}}', "no server reads a quantized output"),
        ('{quantizer_name: "*q_bmm_quantizer", cfg: {num_bits: e4m3}}', "the queries of model.layers.0.self_attn"),
        ('{quantizer_name: "*p_bmm_quantizer", enable: true}', "the attention weights of model.layers.0.self_attn"),
        ('{quantizer_name: "*k_bmm_quantizer", cfg: {num_bits: e4m3}}', "quantizes keys only"),
        (
            '{quantizer_name: "*[kv]_bmm_quantizer", cfg: {num_bits: 8}}',
            "there is no format for this tensor with 8 bits",
        ),
        ('{quantizer_name: "*weight_quantizer", cfg: {num_bits: e4m3, unsigned: true}}', "with e4m3, unsigned"),
        ('{quantizer_name: "*weight_quantizer", cfg: {num_bits: e4m3, rotate: true}}', "with e4m3, rotated"),
        ('{quantizer_name: "*weight_quantizer", cfg: {num_bits: 4, block_sizes: {0: 128}}}', "128 along dimension 0"),
        ('{quantizer_name: "*input_quantizer", cfg: {num_bits: e4m3, constant_amax: 448}}', "constant range 448"),
        ('{quantizer_name: "*weight_quantizer", enable: false}', "nothing its weight"),
        ('{quantizer_name: "*experts*quantizers.3", enable: false}', "rules decide otherwise for"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_where_some_module_is_to_have_it(
    line: str, named: str, planned: tuple, tmp_path: Path
) -> None:
    inputs = '{quantizer_name: "*proj*input_quantizer", cfg: {num_bits: e4m3}}'
    recipe = load_recipe(str(entries(tmp_path, OFF, W8, inputs, line)))
    with pytest.raises(UserError) as caught:
        assign(recipe, *planned)
    assert named in str(caught.value)
    nobodys = line.replace("*", "*nobodys*", 1)
    found = assign(load_recipe(str(entries(tmp_path, OFF, W8, inputs, nobodys))), *planned)
    assert len(found.warnings) == ("enable: false" not in line), "a pattern that fits nothing is told"


@pytest.mark.parametrize(
    ("rotate", "said"),
    [
        (True, "e4m3, rotated"), ({"enable": True, "rotate_fp32": True}, "e4m3, rotated"),
        ({"enable": True, "mode": "rotate", "block_size": None}, "e4m3, rotated"), (False, "e4m3"),
        ({"enable": False, "mode": "rotate"}, "e4m3"),
        ({"enable": True, "block_size": 16}, "e4m3, rotated, block_size 16"),
        ({"enable": True, "mode": "rotate_back"}, "e4m3, rotated, mode rotate_back"),
    ],
)  # fmt: skip
def test_which_rotation_is_ours(rotate: object, said: str) -> None:
    assert phrase(Attributes.model_validate({"num_bits": "e4m3", "rotate": rotate})) == said


def test_every_reason_is_told_once(planned: tuple, tmp_path: Path) -> None:
    """However many layers it is about, so that none is crowded out."""
    lines = [f'{{quantizer_name: "*{leaf}.weight_quantizer", cfg: {{num_bits: 3}}}}' for leaf in ("q_proj", "o_proj")]
    recipe = load_recipe(
        str(entries(tmp_path, OFF, *lines, '{quantizer_name: "*experts*quantizers.3", cfg: {num_bits: e4m3}}'))
    )
    with pytest.raises(UserError) as caught:
        assign(recipe, *planned)
    said = [str(problem) for problem in caught.value.problems]
    assert sum("there is no format for this tensor with 3 bits" in line for line in said) == 2
    assert sum("rules decide otherwise for" in line for line in said) == 1


def test_the_library_has_every_piece_of_the_reference() -> None:
    """Names: facts, sections 1.1, 1.4 and 2; every numerics means a format for some tensor."""
    pieces = library()
    for name, piece in pieces.items():
        if name.startswith("configs/numerics/"):
            formats, reasons = meaning([Attributes.model_validate(piece)])
            assert formats, (name, reasons)
    numerics = "fp8 int8 int8_per_channel int4_per_block nvfp4 nvfp4_static nvfp4_four_over_six nvfp4_bs32 mxfp4 mxfp6"
    assert {f"configs/numerics/{n}" for n in [*numerics.split(), "mxfp8", "mxint8"]} <= set(pieces)
    kv = ("fp8", "fp8_cast", "fp8_affine", "nvfp4", "nvfp4_cast", "nvfp4_affine", "nvfp4_rotate")
    assert {f"configs/ptq/units/kv_{n}" for n in kv} <= set(pieces)
    assert pieces["configs/ptq/units/experts_nvfp4"][0]["cfg"]["block_sizes"][-1] == 16, "imports are in their place"


@pytest.mark.parametrize(
    ("algorithm", "meant"),
    [
        ("max", Max()),
        ("null", Max()),
        ("{method: max, layerwise: {enable: true, save_every: 2}, moe_calib_experts_ratio: null}", Max()),
        ("{method: mse, fp8_scale_sweep: true, layerwise: {enable: false}}", Mse(fp8_scale_sweep=True)),
        ("[max, {method: mse}]", Mse()),
    ],
)
def test_algorithms_as_modelopt_writes_them(algorithm: str, meant: object, tmp_path: Path) -> None:
    assert load_recipe(str(entries(tmp_path, OFF, W8, more=f"algorithm: {algorithm}"))).algorithm == meant


def test_keys_and_values_may_stand_apart(planned: tuple, tmp_path: Path) -> None:
    """As in ModelOpt's auto_quantize files: a quant_cfg that comes last, or a preset's name."""
    for kv in ("{quant_cfg: [{$import: kv}]}", "nvfp4_cast"):
        path = entries(tmp_path, OFF, W8, more=f"kv_cache: {kv}", imports="{kv: configs/ptq/units/kv_nvfp4_cast}")
        found = assign(load_recipe(str(path)).with_kv(None), *planned)
        assert found.kv is not None
        assert found.kv.k.name == "nvfp4_cast"


# ---- ModelOpt's own recipes, by their path in its library


@pytest.mark.parametrize(
    ("path", "preset", "kv"),
    [
        ("general/ptq/fp8_default-kv_fp8", "fp8", "fp8"),
        ("general/ptq/fp8_default-kv_fp8_cast.yaml", "fp8", "fp8_cast"),
        ("general/ptq/nvfp4_default-kv_nvfp4_cast.yml", "nvfp4", "nvfp4_cast"),
        ("general/ptq/nvfp4_experts_only-kv_fp8", "nvfp4_experts_only", "fp8"),
        ("general/ptq/nvfp4_mlp_only-kv_fp8_cast", "nvfp4_mlp_only", "fp8_cast"),
        ("general/ptq/nvfp4_omlp_only-kv_fp8", "nvfp4_omlp_only", "fp8"),
        ("general/ptq/nvfp4_weight_only-kv_fp16", "w4a16_nvfp4", "none"),
    ],
)
def test_recipes_of_modelopts_library_that_are_presets(path: str, preset: str, kv: str) -> None:
    recipe = load_recipe(path)
    assert recipe.with_kv(None).rules == load_recipe(preset).with_kv(kv).rules
    assert (recipe.algorithm, recipe.kv_cache) == (load_recipe(preset).algorithm, kv)
    assert recipe.name == Path(path).name.removesuffix(".yaml").removesuffix(".yml"), "as the user called it"
    assert recipe.with_kv("fp8_cast" if kv != "fp8_cast" else "none").notes, "the option wins, with a warning"


@pytest.mark.parametrize(
    "path",
    [
        "general/ptq/nvfp4_default-kv_none-gptq", "general/ptq/nvfp4_experts_only_mse-kv_fp8_cast.yaml",
        "general/ptq/nvfp4_experts_only-kv_fp8_layerwise", "general/ptq/mxfp4_mlp_weight_only",
        "general/ptq/fp8_default", "general/ptq/fp8-kv_fp8", "general/ptq/../ptq/fp8_default-kv_fp8",
        "general/auto_quantize/nvfp4_fp8_at_5p4bits",
    ],
)  # fmt: skip
def test_other_recipes_of_modelopts_library_are_refused(path: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    (problem,) = caught.value.problems
    assert problem.what == f"--recipe {path}: there is no such file, nor a preset that is this recipe of ModelOpt's"
    assert problem.cure.startswith(
        "name a preset, as in --qformat nvfp4 with --kv_cache_qformat fp8 (--list shows all)"
    )
    assert "general/ptq/ with fp8_default, nvfp4_default, " in problem.cure


def test_a_file_at_such_a_path_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "general" / "ptq"
    folder.mkdir(parents=True)
    entries(folder, OFF, W8).rename(folder / "nvfp4_default-kv_fp8")
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("general/ptq/nvfp4_default-kv_fp8")
    assert (recipe.says_all, recipe.kv_cache) == (True, None)
