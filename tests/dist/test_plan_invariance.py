"""What comes out does not depend on how many ranks made it, nor on how the model lay on them (promise P1).

bf16 models on CPUs with one thread: every tensor of an export over several ranks is that of one process bit for bit,
input scales included. One launch carries out many requests, for several models, since starting ranks takes longer than
quantizing a tiny model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import differences, run_requests
from safetensors.torch import save_file
from tiny import save_tiny_vision

from hf_ptq.model.exchange import MANY_CHOICES
from hf_ptq.quantization.recipe import RECIPES_DIR

MOE = (("qwen3_moe", "deepseek_v3"), ("mixtral", "glm4_moe", "minimax_m2"))  # for two workers
# Name -> (ranks, options).
MOE_PLANS: dict[str, tuple[int, dict]] = {
    "fsdp2 without a launcher": (0, {"use_fsdp2": True}),
    "fsdp2 on one rank": (1, {"use_fsdp2": True}),
    "ep 2": (2, {}),
    "ep 2, dense sharded": (2, {"dense": "fsdp"}),
    "fsdp2": (2, {"use_fsdp2": True}),
    "replicated": (2, {"ep_degree": 1}),
    "ep 4": (4, {}),
    "ep 2 in two groups": (4, {"ep_degree": 2}),
    "ep 2 in two groups, dense sharded": (4, {"ep_degree": 2, "dense": "fsdp"}),
}
DENSE_PLANS: dict[str, tuple[int, dict]] = {
    "fsdp2 on one rank": (1, {"use_fsdp2": True}),
    "replicated": (2, {}),
    "fsdp2": (2, {"use_fsdp2": True}),
    "fsdp2 over three": (3, {"use_fsdp2": True}),  # which cuts no number of rows evenly
}


def export_path(directory: Path, source: Path, plan: str, variant: str) -> Path:
    return directory / f"{source.name}-{plan}-{variant}".replace(" ", "_").replace(",", "")


def compare(
    sources: list[Path],
    plans: dict[str, tuple[int, dict]],
    variants: dict[str, dict],
    directory: Path,
    check_export: Callable[[Path, Path], None],
    **base: object,
) -> None:
    """Export each source by each plan with each variant of the options; all plans give what one process gives."""
    plans = {"one process": (0, {}), **plans}
    base = {"device": "cpu", "durable": False, "verbose": False, **base}
    cases = [(source, plan, name) for source in sources for plan in plans for name in variants]
    for ranks in sorted({ranks for ranks, _ in plans.values()}):
        requests = [
            {
                **base, **plans[plan][1], **variants[name],
                "model": str(source), "export_path": export_path(directory, source, plan, name),
            }
            for source, plan, name in cases if plans[plan][0] == ranks
        ]  # fmt: skip
        run_requests(ranks, requests, directory)
    for source, plan, name in cases:
        made = export_path(directory, source, plan, name)
        found = differences(export_path(directory, source, "one process", name), made)
        assert not found, f"{source.name}, {plan}, {name}: {len(found)} tensors differ: {found[:5]}"
        check_export(source, made)


CALIBRATED = {
    "nvfp4": {"qformat": "nvfp4", "kv_cache_qformat": "fp8"},
    "fp8": {"qformat": "fp8", "skip_generate": True},
}
DATA_FREE = {
    "w4a16_nvfp4": {"qformat": "w4a16_nvfp4"},
    "int8_weight_only": {"qformat": "int8_weight_only", "max_shard_bytes": 100_000},
}


@pytest.mark.parametrize("names", MOE, ids="+".join)
def test_experts(names, tiny, token_rows, tmp_path, check_export):
    sources = [tiny(name) for name in names]
    compare(sources, MOE_PLANS, CALIBRATED, tmp_path, check_export, datasets=[str(token_rows)])


def test_experts_without_data(tiny, tmp_path, check_export):
    plans = {name: plan for name, plan in MOE_PLANS.items() if plan[0] == 2}
    compare([tiny("qwen3_moe")], plans, DATA_FREE, tmp_path, check_export)


def test_a_head_that_is_quantized_sees_every_token(tiny, token_rows, tmp_path, check_export):
    recipe = tmp_path / "head.yaml"
    rules = (RECIPES_DIR / "presets" / "fp8.yaml").read_text(encoding="utf-8")
    head = '  - {pattern: "*lm_head*", weight: fp8, input: fp8}\n'
    recipe.write_text(rules.replace("algorithm:", f"{head}algorithm:"), encoding="utf-8")
    plans = {name: MOE_PLANS[name] for name in ("fsdp2 on one rank", "ep 2", "ep 2, dense sharded", "fsdp2")}
    variants = {"head": {"recipe": str(recipe), "skip_generate": True}}
    compare([tiny("qwen3_moe")], plans, variants, tmp_path, check_export, datasets=[str(token_rows)])


def test_dense(tiny, token_rows, tmp_path, check_export):
    sources = [tiny(name) for name in ("llama_tied", "llama_wide")]
    compare(sources, DENSE_PLANS, CALIBRATED | DATA_FREE, tmp_path, check_export, datasets=[str(token_rows)])


def test_layouts_and_experts_that_are_one_tensor_on_the_hub(tiny, token_rows, tmp_path):
    """Also the quantizers' state; the independent checker knows the modelopt layout of single experts only."""
    plans = {name: MOE_PLANS[name] for name in ("ep 2", "fsdp2")}
    variants = {
        "modelopt": {"qformat": "nvfp4"},
        "fakequant": {"qformat": "int8", "kv_cache_qformat": "fp8", "export_fmt": "fakequant"},
    }
    separate = {"ct": {"qformat": "nvfp4", "kv_cache_qformat": "fp8", "export_fmt": "compressed-tensors"}}
    base = {"datasets": [str(token_rows)]}
    (tmp_path / "vision").mkdir()
    fused = [tiny("gpt_oss_wide"), save_tiny_vision(tmp_path / "vision")]
    compare(fused, plans, variants, tmp_path, lambda *_: None, **base)
    compare(
        [tiny("qwen3_moe")], plans, separate | {"fakequant": variants["fakequant"]}, tmp_path, lambda *_: None, **base
    )
# Formats that treat rows together (tiles, packed rows), and searches. What one process makes is checked elsewhere.
BY_ROWS = ("fp8_2d_blockwise_weight_only", "int4_blockwise_weight_only")
SWEEP = "nvfp4_w4a4_weight_mse_fp8_sweep"
PLAIN_SEARCH = """rules:
  - {pattern: "*", weight: fp8, input: fp8}
  - {pattern: ["*mlp*", "*.o_proj"], weight: int8_per_channel}
  - {import: default_disabled}
algorithm: mse
"""


def test_formats_and_searches(tiny, token_rows, tmp_path):
    recipe = tmp_path / "search.yaml"
    recipe.write_text(PLAIN_SEARCH)
    quiet = {"skip_generate": True}
    variants = {name: {"qformat": name, **quiet} for name in ("w4a8_nvfp4_fp8", SWEEP)}
    variants |= {name: {"qformat": name} for name in BY_ROWS}  # with previews: rounded rows are left in the model
    variants["plain search"] = {"recipe": str(recipe), **quiet}
    options = {"datasets": [str(token_rows)], "calib_sizes": [4]}
    for name, plans in (("qwen3_moe_wide", ("ep 2, dense sharded",)), ("llama_wide", ("replicated", "fsdp2 over three"))):
        wanted = {plan: (MOE_PLANS | DENSE_PLANS)[plan] for plan in plans}
        compare([tiny(name)], wanted, variants, tmp_path, lambda *_: None, **options)
        for variant in BY_ROWS:  # what rank 0's model says with rounded weights
            said = {p: previews(export_path(tmp_path, tiny(name), p, variant)) for p in ("one process", *plans)}
            assert all(texts == said["one process"] and texts["after"] for texts in said.values()), said


def previews(export: Path) -> dict[str, str]:
    return json.loads(Path(f"{export}-rank0.json").read_text(encoding="utf-8"))["previews"]


@pytest.mark.demo
def test_the_demo_model(tmp_path, check_export, demo_source):
    """A real language model: several ranks, one result."""
    plans = {name: DENSE_PLANS[name] for name in ("replicated", "fsdp2")}
    variants = {"fp8": {"qformat": "fp8", "kv_cache_qformat": "fp8"}}
    rows = {"datasets": ["pydoc"], "calib_sizes": [6], "calib_seq": 128}
    compare([demo_source], plans, variants, tmp_path, check_export, **rows)


def test_odd_rows_and_a_rank_whose_experts_starve(tiny, tmp_path, check_export):
    """5 rows on 2 ranks, 7 on 4: some ranks repeat a batch that must not be seen."""
    ids = torch.randint(3, 250, (7, 32), generator=torch.Generator().manual_seed(3))
    variants = {"fp8": {"qformat": "fp8", "kv_cache_qformat": "fp8"}}
    plans_of = {
        5: {"ep 2": (2, {}), "replicated": (2, {"ep_degree": 1}), "fsdp2": (2, {"use_fsdp2": True})},
        7: {"ep 4": (4, {}), "ep 2 in two groups, dense sharded": (4, {"ep_degree": 2, "dense": "fsdp"})},
    }
    for rows, plans in plans_of.items():
        directory = tmp_path / str(rows)
        directory.mkdir()
        save_file({"input_ids": ids[:rows].clone()}, directory / "rows.safetensors")
        base = {"datasets": [str(directory / "rows.safetensors")], "batch_size": 1, "skip_generate": True}
        compare([tiny("qwen3_moe_starved")], plans, variants, directory, check_export, **base)


def test_batches_whose_tokens_go_to_experts_in_two_parts(tiny, tmp_path, check_export):
    """So many choices a batch that a rank's choices of its own experts do not travel (model/exchange.py)."""
    rows, length, choices = 8, 512, 2
    assert rows * length * choices >= MANY_CHOICES
    ids = torch.randint(3, 250, (4 * rows, length), generator=torch.Generator().manual_seed(4))
    save_file({"input_ids": ids}, tmp_path / "rows.safetensors")
    base = {"datasets": [str(tmp_path / "rows.safetensors")], "batch_size": rows, "skip_generate": True}
    plans = {name: MOE_PLANS[name] for name in ("ep 2", "ep 2 in two groups")}
    compare([tiny("qwen3_moe")], plans, {"fp8": CALIBRATED["fp8"]}, tmp_path, check_export, **base)


MIXED = """
description: NVFP4 experts, FP8 attention, the first and the last layer as they are
rules:
  - {pattern: "*.experts.*", weight: nvfp4, input: nvfp4}
  - {pattern: "*.self_attn.*", weight: fp8, input: fp8}
  - {import: default_disabled}
  - {pattern: ["*.layers.0.*", "*.layers.-1.*"], enable: false}
"""


def test_a_recipe_that_mixes_layers(tiny, token_rows, tmp_path, check_export):
    """Latent attention among them, which SGLang cannot exclude layer by layer."""
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(MIXED, encoding="utf-8")
    sources = [tiny(name) for name in ("qwen3_moe", "deepseek_v3")]
    plans = {name: MOE_PLANS[name] for name in ("ep 2", "fsdp2")}
    variants = {"mixed": {"recipe": str(recipe), "skip_generate": True}}
    compare(sources, plans, variants, tmp_path, check_export, datasets=[str(token_rows)])
    for source in sources:
        text = (export_path(tmp_path, source, "ep 2", "mixed") / "config.json").read_text(encoding="utf-8")
        block = json.loads(text)["quantization_config"]
        assert block["quant_algo"] == "MIXED_PRECISION"
        assert {name.split(".")[2] for name in block["quantized_layers"]} == {"1"}
        assert (block["ignore"] == []) == (source.name == "deepseek_v3")
