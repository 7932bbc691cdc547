"""Random recipes, ours and in ModelOpt's schema: refused with a message, or config and tensors agree.

Most are only planned, on models without weights; some are exported and held against the independent checker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from hf_ptq import planning
from hf_ptq.checkpoint.source import open_source
from hf_ptq.config import EXPORT_FORMATS, RunConfig
from hf_ptq.distributed.process_group import DistributedState
from hf_ptq.errors import UserError
from hf_ptq.export.config_files import NESTED_NAME
from hf_ptq.export.layout import ALGOS
from hf_ptq.quantization.formats.description import formats_for
from hf_ptq.quantization.modelopt_imports import library
from hf_ptq.report import Report

MODELS = ("qwen3_moe_wide", "deepseek_v3_wide", "nemotron_h", "llama_tied")
PATTERNS = (
    "*", "*.mlp.*", "*.experts.*", "*self_attn*", "*o_proj", "*up_proj", "*.layers.0.*", "*.layers.-1.*", "*lm_head*",
    "*gate*", "*mixer*", "*q_a_proj", "*embed*", "*shared*", "*.experts.3.*", "nothing", "*[kv]_proj", "*layers.[01]*",
)  # fmt: skip
CLASSES = ("Linear", "Embedding", "Module", "Conv1d", "SyncBatchNorm", "Absent")
FEW = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def one_of_roles(role: str) -> st.SearchStrategy[str]:
    return st.sampled_from(formats_for(role))  # type: ignore[arg-type]


def pairs() -> st.SearchStrategy[dict]:
    """Weight and input as servers have names for, most of the time."""
    named = st.sampled_from([{"weight": w, **({"input": i} if i else {})} for w, i in ALGOS])
    return st.one_of(named, named, st.fixed_dictionaries({"weight": one_of_roles("weight")}))


@st.composite
def rules(draw: st.DrawFn) -> dict:
    """One rule of ours."""
    rule: dict = {
        "pattern": draw(st.one_of(st.sampled_from(PATTERNS), st.lists(st.sampled_from(PATTERNS), max_size=2)))
    }
    if draw(st.integers(0, 4)) == 0:
        rule["parent_class"] = draw(st.sampled_from(CLASSES))
    kind = draw(st.sampled_from(("give", "give", "off", "cache")))
    if kind == "give":
        return rule | draw(pairs())
    if kind == "off":
        return rule | {"enable": False}
    return rule | {"k": draw(one_of_roles("kv")), "v": draw(one_of_roles("kv"))}


@st.composite
def ours(draw: st.DrawFn) -> dict:
    """A recipe file of ours, with what is left alone by default most of the time."""
    found = draw(st.lists(rules(), min_size=1, max_size=4))
    if draw(st.integers(0, 3)):
        found.append({"import": "default_disabled"})
    kv = draw(st.sampled_from((None, "none", "fp8", "nvfp4_cast")))
    algorithm = draw(st.sampled_from(("max", "max", "mse", {"method": "mse", "fp8_scale_sweep": True})))
    return {"rules": found, "algorithm": algorithm, **({} if kv is None else {"kv_cache": kv})}


NUMERICS = [name for name in library() if "/numerics/" in name]
UNITS = [name for name in library() if "/units/" in name]
QUANTIZERS = ("*weight_quantizer", "*input_quantizer", "*", "*output_quantizer", "*[kv]_bmm_quantizer")


@st.composite
def modelopts(draw: st.DrawFn) -> dict:
    """A recipe file in ModelOpt's schema, which turns everything off first most of the time."""
    imports: dict[str, str] = {}
    entries: list[dict] = [{"quantizer_name": "*", "enable": False}] * draw(st.sampled_from((0, 1, 1, 1)))
    for i in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(("unit", "cfg", "cfg", "toggle")))
        imports[f"a{i}"] = draw(st.sampled_from(UNITS if kind == "unit" else NUMERICS))
        end = draw(st.sampled_from(QUANTIZERS))
        name = draw(st.sampled_from(PATTERNS)).removesuffix("*") + end
        cfg = {"quantizer_name": name, "cfg": {"$import": f"a{i}"}}
        toggle = {"quantizer_name": name, "enable": draw(st.booleans())}
        entries.append({"unit": {"$import": f"a{i}"}, "cfg": cfg, "toggle": toggle}[kind])
    body = {"algorithm": draw(st.sampled_from(("max", None, {"method": "mse"}))), "quant_cfg": entries}
    return {"imports": imports, "metadata": {"recipe_type": "ptq"}, "quantize": body}


@pytest.fixture(scope="module")
def planned(tiny: Callable[[str], Path]) -> Callable[[str], tuple]:
    """A source, its model without weights, its units and the plan; made once each."""
    made: dict[str, tuple] = {}

    def get(name: str) -> tuple:
        if name not in made:
            import torch

            silent = Report(Console(quiet=True), verbose=False)
            config = RunConfig(str(tiny(name)), Path("out"), device="cpu")
            source = open_source(config.model, None, False, silent)
            state = DistributedState(0, 1, torch.device("cpu"))
            made[name] = (source, *planning.plan_model(config, source, state, silent))
        return made[name]

    return get


def told(error: UserError) -> bool:
    """False: a refusal; it has to say something."""
    assert error.problems
    assert all(problem.what for problem in error.problems)
    return False


def refused_or_sound(recipe: dict, layout: str, plan: tuple, folder: Path) -> bool:
    """Plan it; True where it was not refused."""
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    source, *_ = plan
    silent = Report(Console(quiet=True), verbose=False)
    config = RunConfig(str(source.directory), folder / "out", recipe=str(path), export_fmt=layout, device="cpu")
    try:
        read = planning.read_recipe(config)
        assignment, export = planning.plan_export(config, read, *plan, silent)
    except UserError as error:
        return told(error)
    modules = assignment.by_module
    contents = export.contents
    assert set(contents.schemes) == set(modules)
    assert not set(modules) & set(contents.unquantized)
    stored = {tensor.name for shard in export.shards for tensor in shard.tensors}
    with_scales = {name.rpartition(".weight_")[0] for name in stored if ".weight_" in name}
    assert layout == "fakequant" or with_scales == set(modules)
    found = export.layout.disagreements(export.files["config.json"], export.files.get(NESTED_NAME, {}), contents)
    assert list(found) == []
    return True


@pytest.mark.parametrize("model", MODELS)
def test_a_recipe_of_ours_is_refused_or_sound(model: str, planned: Callable[[str], tuple], tmp_path: Path) -> None:
    @FEW
    @given(ours(), st.sampled_from(EXPORT_FORMATS))
    def check(recipe: dict, layout: str) -> None:
        kept.append(refused_or_sound(recipe, layout, planned(model), tmp_path))

    kept: list[bool] = []
    check()
    assert 0 < sum(kept) < len(kept), "some are refused, some are not"


@pytest.mark.parametrize("model", MODELS[:2])
def test_a_recipe_of_modelopts_is_refused_or_sound(model: str, planned: Callable[[str], tuple], tmp_path: Path) -> None:
    @FEW
    @given(modelopts(), st.sampled_from(EXPORT_FORMATS))
    def check(recipe: dict, layout: str) -> None:
        kept.append(refused_or_sound(recipe, layout, planned(model), tmp_path))

    kept: list[bool] = []
    check()
    assert 0 < sum(kept) < len(kept), "some are refused, some are not"


SERVED = [
    {"weight": w, **({"input": i} if i else {})}
    for w, i in (("fp8", "fp8"), ("nvfp4", "nvfp4"), ("nvfp4", None), ("fp8_2d", None), ("mxfp8", "mxfp8"))
]


@st.composite
def mixed(draw: st.DrawFn) -> dict:
    """Experts, other feed-forward layers and attention each in a format, or as they are; some layers left alone."""
    parts = ("*.experts.*", "*shared_experts*", "*.mlp.*_proj", "*self_attn*")
    found = [
        {"pattern": part, **draw(st.sampled_from(SERVED)), "optional": True} for part in parts if draw(st.booleans())
    ]
    found = found or [{"pattern": "*", **draw(st.sampled_from(SERVED))}]
    layer = draw(st.sampled_from((None, "*.layers.0.*", "*.layers.-1.*", "*.layers.0.self_attn.*")))
    off = [{"pattern": layer, "enable": False}] if layer else []
    return {"rules": [*found, {"import": "default_disabled"}, *off]}


@pytest.mark.parametrize("model", ["qwen3_moe_wide", "deepseek_v3_wide"])
def test_an_export_by_a_random_recipe_passes_the_checker(
    model: str,
    tiny: Callable[[str], Path],
    quantize: Callable[..., Path],
    check_export: Callable[[Path, Path], None],
    tmp_path: Path,
) -> None:
    path = tmp_path / "recipe.yaml"
    made: list[Path] = []

    @settings(FEW, max_examples=8)
    @given(mixed())
    def check(recipe: dict) -> None:
        path.write_text(yaml.safe_dump(recipe))
        try:
            export = quantize(tiny(model), recipe=str(path), name=f"export-{len(made)}")
        except UserError as error:
            told(error)
            return
        made.append(export)
        check_export(tiny(model), export)

    check()
    assert len(made) > 2, "some are not refused"
