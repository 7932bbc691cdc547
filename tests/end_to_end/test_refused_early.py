"""What a recipe or a model makes impossible is said before anything is loaded; what only looks possible, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import altered, load_tensors, raw, save_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from hf_ptq.errors import RunError, UserError
from hf_ptq.model.attention import use_our_attention
from hf_ptq.report import Report

Quantize = Callable[..., Path]


def write(path: Path, *rules: str) -> str:
    path.write_text("rules:\n" + "".join(f"  - {rule}\n" for rule in rules))
    return str(path)


def test_experts_that_a_format_cannot_take_are_left_alone_by_layer(
    quantize: Quantize, check_export: Callable, tmp_path: Path
) -> None:
    """An inner size of 24 is no multiple of 16: servers take all experts of a layer or none."""
    source = save_tiny("qwen3_moe", tmp_path / "source", moe_intermediate_size=24)
    report = Report(verbose=False)
    export = quantize(source, "nvfp4", report=report)
    check_export(source, export)
    told = "3 modules (model.layers.0.mlp.experts ...) are left unquantized: 24 inputs of down_proj"
    assert [told in w for w in report.warnings].count(True) == 1
    names = load_tensors(export)
    assert "model.layers.0.self_attn.q_proj.weight_scale" in names
    assert not any(".experts." in name and "scale" in name for name in names)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ('{pattern: "*.layers.0.*", k: fp8, v: fp8}', "one format for the KV cache of all layers"),
        ('{pattern: "nosuch", k: fp8, v: fp8}', None),
        ('{pattern: "*", k: nvfp4, v: nvfp4}', "need multiples of 16"),
    ],
)
def test_rules_for_the_cache(rule: str, said: str | None, quantize: Quantize, tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "source", head_dim=24)
    recipe = write(tmp_path / "r.yaml", '{pattern: "*", weight: fp8, input: fp8}', "{import: default_disabled}", rule)
    if said is None:
        assert not any("k_scale" in name for name in load_tensors(quantize(source, recipe=recipe)))
        return
    with pytest.raises(UserError, match=said):
        quantize(source, recipe=recipe)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_source_that_is_quantized_without_saying_so(
    dtype: torch.dtype, tiny: Callable, quantize: Quantize, tmp_path: Path
) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    source = altered(tiny("llama"), tmp_path / "source", lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(UserError, match=f"{name} is stored as"):
        quantize(source, "fp8")


def test_a_source_that_changes_during_the_run(
    tiny: Callable, quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_ptq import driver

    source = altered(tiny("llama"), tmp_path / "source", lambda _: None)
    load = driver.load

    def load_and_replace(*arguments: object) -> None:
        load(*arguments)
        file = source / "model.safetensors"
        file.write_bytes(file.read_bytes())

    monkeypatch.setattr(driver, "load", load_and_replace)
    with pytest.raises(RunError, match="the source changed during the run: model"):
        quantize(source, "fp8")


def test_a_source_that_changes_after_its_headers_were_read(
    tiny: Callable, quantize: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_ptq import planning

    source = altered(tiny("llama"), tmp_path / "source", lambda _: None)
    read_data = planning.read_data

    def read_and_replace(*arguments: object) -> object:
        data = read_data(*arguments)
        altered(tiny("llama"), tmp_path / "other", lambda t: t.update({n: x * 2 for n, x in t.items()}))
        (tmp_path / "other" / "model.safetensors").rename(source / "model.safetensors")
        return data

    monkeypatch.setattr(planning, "read_data", read_and_replace)
    with pytest.raises(RunError, match="the source changed during the run"):
        quantize(source, "fp8")


def test_previews_do_not_change_what_is_calibrated(quantize: Quantize, tmp_path: Path) -> None:
    """Dynamic rotary tables grow with the longest text that was generated."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    source = save_tiny("llama", tmp_path / "source", max_position_embeddings=96, rope_parameters=rope)
    with_previews = load_tensors(quantize(source, "fp8", name="with", skip_generate=False))
    without = load_tensors(quantize(source, "fp8", name="without"))
    assert {n: raw(t) for n, t in with_previews.items()} == {n: raw(t) for n, t in without.items()}


def test_weights_that_their_group_drowns_are_told(tiny: Callable, quantize: Quantize, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    source = altered(tiny("llama"), tmp_path / "source", lambda t: t.update({name: t[name] * 1e-20}))
    report = Report(verbose=False)
    quantize(source, "nvfp4", report=report)
    assert any("mostly noise" in text and "model.layers.1.mlp.up_proj" in text for text in report.warnings)


def test_a_tied_head_that_a_recipe_asks_for_is_told(tiny: Callable, quantize: Quantize, tmp_path: Path) -> None:
    recipe = write(tmp_path / "r.yaml", '{pattern: ["*mlp*", "lm_head"], weight: fp8, input: fp8}')
    with pytest.raises(UserError, match=r"(?s)lm_head shares its weight with model.embed_tokens.weight.*enable: false"):
        quantize(tiny("llama_tied"), recipe=recipe)


def test_families_that_ask_for_the_kernels_name_keep_their_masks(tmp_path: Path) -> None:
    """Sparse attention applies its mask only where the kernel is called sdpa or eager."""
    options = {
        "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
        "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 48,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "index_topk": 4, "index_n_heads": 4,
        "index_head_dim": 32, "initializer_range": 0.2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v32", **options)).eval()
    ids = torch.randint(3, 250, (1, 40))
    with torch.no_grad():
        expected = model(ids).logits
        use_our_attention(model)
        assert torch.equal(model(ids).logits, expected)


def test_experts_that_are_left_in_one_tensor_are_excluded(quantize: Quantize, tmp_path: Path) -> None:
    """A recipe for the attention alone: servers must not take the experts for quantized."""
    import json

    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 16}
    source = save_tiny("gpt_oss", tmp_path / "source", **options)
    recipe = write(tmp_path / "r.yaml", '{pattern: "*self_attn*", weight: fp8, input: fp8}')
    export = quantize(source, recipe=recipe)
    ours, theirs = load_tensors(export), load_tensors(source)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert raw(ours[name]) == raw(theirs[name])
    excluded = json.loads((export / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert {f"model.layers.{i}.mlp.experts" for i in range(3)} <= set(excluded)
