"""Models in memory on their way to a checkpoint: the command's bytes, or what training has made of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny import load_tensors, raw
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ptq
from hf_ptq.data.rows import read_calibration
from hf_ptq.errors import UserError
from hf_ptq.quantization.formats import codecs
from hf_ptq.report import Report

ROOT = Path(__file__).resolve().parents[2]


def batches(token_rows: Path) -> list[dict[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return [{"input_ids": batch} for batch in load_file(token_rows)["input_ids"].split(4)]


def same(one: Path, other: Path) -> None:
    ours, theirs = load_tensors(one), load_tensors(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if raw(ours[name]) != raw(theirs[name])] == []
    for name in ("config.json", "hf_quant_config.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "qformat", "kv"),
    [
        ("llama_wide", "nvfp4", None),
        ("llama_tied", "fp8", "fp8"),
        ("llama", "fp8_per_channel_per_token", "none"),
        ("qwen3_moe", "nvfp4", "nvfp4_cast"),
        ("qwen3_moe", "int8_weight_only", None),
        ("deepseek_v3", "fp8", "fp8"),
    ],
)
def test_the_bytes_of_the_command(name, qformat, kv, tiny, token_rows, quantize, check_export, tmp_path):
    """Exported at once, and from a model that got its quantizers from a file."""
    source, data = tiny(name), batches(token_rows)
    command = quantize(source, qformat, kv_cache_qformat=kv, batch_size=4)
    model = AutoModelForCausalLM.from_pretrained(source)
    hf_ptq.quantize(model, qformat, lambda m: hf_ptq.calibration_loop(m, data), kv_cache_qformat=kv)
    hf_ptq.export(model, source, tmp_path / "direct")
    hf_ptq.save_state(hf_ptq.quantizer_state(model), tmp_path / "state")
    again = AutoModelForCausalLM.from_pretrained(source)
    hf_ptq.restore_quantizers(again, hf_ptq.read_state(tmp_path / "state"))
    assert torch.equal(again(**data[0]).logits, model(**data[0]).logits)
    hf_ptq.export(again, source, tmp_path / "restored")
    for export in ("direct", "restored"):
        same(command, tmp_path / export)
    check_export(source, tmp_path / "direct")


@pytest.mark.parametrize(("name", "qformat"), [("llama_tied", "fp8"), ("qwen3_moe_wide", "nvfp4")])
def test_what_was_trained_is_what_is_exported(name, qformat, tiny, token_rows, tmp_path):
    source, data = tiny(name), batches(token_rows)
    model = AutoModelForCausalLM.from_pretrained(source)
    hf_ptq.quantize(model, qformat, lambda m: hf_ptq.calibration_loop(m, data))
    optimizer = torch.optim.SGD([*model.parameters(), *hf_ptq.learn_ranges(model)], lr=0.05)
    model.train()
    for batch in data:
        optimizer.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
    hf_ptq.export(model.eval(), source, tmp_path / "trained")
    stored, before = load_tensors(tmp_path / "trained"), load_tensors(source)
    changed = 0
    with torch.no_grad():
        for module, weight in forward_weights(model).items():
            codec = codecs()[qformat]
            tensors = {local: stored[f"{module}.{local}"] for local in codec.layout((16, 128))}
            assert torch.equal(codec.decode(tensors).to(weight.dtype), weight), module
            changed += int(not torch.equal(codec.decode(tensors).to(weight.dtype), before[f"{module}.weight"]))
    assert changed > 10
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(stored[norm], model.get_parameter(norm))
    assert not torch.equal(stored[norm], before[norm])
    query = hf_ptq.quantizers(model)["model.layers.0.self_attn.q_proj.input_quantizer"]
    assert torch.equal(
        stored["model.layers.0.self_attn.k_proj.input_scale"], query.codec.input_scale(query.amax.detach())
    )


def forward_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that a forward multiplies with, by the checkpoint's names; seen from inside of the modules."""
    seen: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if "gate_up_proj" in module._parameters:

            def note_experts(module, _args, name=name):
                for e, (both, down) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
                    gate, up = both.chunk(2)
                    seen.update(
                        {f"{name}.{e}.gate_proj": gate, f"{name}.{e}.up_proj": up, f"{name}.{e}.down_proj": down}
                    )

            handles.append(module.register_forward_pre_hook(note_experts))
        elif "weight_quantizer" in module._modules:
            handles.append(
                module.register_forward_pre_hook(lambda module, _args, name=name: seen.update({name: module.weight}))
            )
    model(torch.tensor([[5, 6, 7, 8]]))
    for handle in handles:
        handle.remove()
    return seen


def test_what_is_switched_off_stays_as_it_is(tiny, token_rows, check_export, tmp_path):
    source, data = tiny("llama_wide"), batches(token_rows)
    model = AutoModelForCausalLM.from_pretrained(source)
    hf_ptq.quantize(model, "nvfp4", lambda m: hf_ptq.calibration_loop(m, data))
    hf_ptq.disable(model, "model.layers.1.mlp.*")
    hf_ptq.export(model, source, tmp_path / "export")
    check_export(source, tmp_path / "export")
    stored, before = load_tensors(tmp_path / "export"), load_tensors(source)
    assert raw(stored["model.layers.1.mlp.up_proj.weight"]) == raw(before["model.layers.1.mlp.up_proj.weight"])
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    hf_ptq.disable(model, "model.layers.0.self_attn.q_proj.weight_quantizer")
    with pytest.raises(UserError, match="servers fuse these, so they need one format"):
        hf_ptq.export(model, source, tmp_path / "split")
    assert not (tmp_path / "split").exists()


def test_models_that_cannot_be_exported(tiny, token_rows, tmp_path):
    linear = hf_ptq.quantize(torch.nn.Linear(16, 16), {"rules": [{"pattern": "*", "weight": "fp8"}]})
    with pytest.raises(UserError, match="a Linear has no layout that servers load"):
        hf_ptq.export(linear, tiny("llama"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    with pytest.raises(UserError, match="is not quantized"):
        hf_ptq.export(model, tiny("llama"), tmp_path / "out")
    hf_ptq.quantize(model, "w4a16_nvfp4")
    with pytest.raises(UserError, match=r"has the shape \[.*\] in the model, \[.*\] in the source"):
        hf_ptq.export(model, tiny("llama_wide"), tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.demo
def test_training_brings_the_demo_model_back(demo_source):
    """KL to the bf16 model, on tokens that are not trained on, falls within a few steps."""
    tokenizer = AutoTokenizer.from_pretrained(demo_source)
    data = read_calibration(["pydoc"], [8], 64, tokenizer, Report(verbose=False))
    held, *training = torch.stack(data.rows).split(2)
    teacher = AutoModelForCausalLM.from_pretrained(demo_source, dtype=torch.bfloat16).eval()
    model = AutoModelForCausalLM.from_pretrained(demo_source, dtype=torch.float32)
    hf_ptq.quantize(model, "nvfp4", lambda m: hf_ptq.calibration_loop(m, training))

    def divergence(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(ids).logits.float().log_softmax(-1).flatten(0, 1)
        own = model(ids).logits.log_softmax(-1).flatten(0, 1)
        return torch.nn.functional.kl_div(own, wanted, log_target=True, reduction="batchmean")

    with torch.no_grad():
        before = float(divergence(held))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for ids in (*training, *training[:1]):
        divergence(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert float(divergence(held)) < 0.95 * before


# --- the README's examples ------------------------------------------------------------------------------


def examples() -> list[str]:
    """The two blocks of the section on the library."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## As a library\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize(("number", "lines"), [(0, 15), (1, 25)])
def test_the_readme_runs(number, lines, tiny, check_export, tmp_path, monkeypatch):
    code = examples()[number]
    assert len(code.splitlines()) <= lines
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(f"a line of text, number {i}" for i in range(8)), encoding="utf-8")
    source = tiny("llama_wide")
    assert code.count("Qwen/Qwen3-0.6B") == 1
    exec(compile(code.replace("Qwen/Qwen3-0.6B", str(source)), "README.md", "exec"), {})
    (export,) = (path for path in tmp_path.iterdir() if path.is_dir())
    if number == 0:
        check_export(source, export)
    else:  # trained, so that what is not quantized is not the source's either
        stored, before = load_tensors(export), load_tensors(source)
        assert stored["model.layers.1.mlp.up_proj.weight"].dtype == torch.uint8
        assert raw(stored["model.embed_tokens.weight"]) != raw(before["model.embed_tokens.weight"])
