"""What an export does and does not depend on, and that nothing of the source is lost or changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tiny import altered, byte_tokenizer, load_tensors, raw

from hf_ptq.report import Report

Quantize = Callable[..., Path]
Check = Callable[[Path, Path], None]


def weight_files(export: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(export.glob("*.safetensors"))}


def config_of(export: Path) -> dict:
    return json.loads((export / "config.json").read_text())["quantization_config"]


def report_of(export: Path) -> dict:
    return json.loads((export / "hf_ptq_report.json").read_text())


# ---- what it does not depend on


@pytest.mark.parametrize(
    ("model", "preset"), [("llama", "nvfp4"), ("qwen3_moe", "fp8"), ("llama_tied", "int8_weight_only")]
)
def test_previews_change_nothing(model: str, preset: str, tiny: Callable, quantize: Quantize) -> None:
    quiet = quantize(tiny(model), preset, name="quiet")
    spoken = quantize(tiny(model), preset, name="spoken", skip_generate=False)
    assert weight_files(quiet) == weight_files(spoken)
    assert "previews" not in report_of(quiet)
    assert {key for key, text in report_of(spoken)["previews"].items() if text} >= {"prompt", "before", "after"}


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("preset", ["fp8", "nvfp4"])
def test_the_batch_size_changes_nothing(model: str, preset: str, tiny: Callable, quantize: Quantize) -> None:
    one, three, eight = (quantize(tiny(model), preset, name=f"b{size}", batch_size=size) for size in (1, 3, 8))
    assert weight_files(one) == weight_files(three) == weight_files(eight)


def test_two_runs_give_the_same_files(tiny: Callable, quantize: Quantize) -> None:
    first, second = (quantize(tiny("llama"), "nvfp4", name=name, seed=seed) for name, seed in (("a", 1), ("b", 2)))
    assert weight_files(first) == weight_files(second)
    for name in ("config.json", "hf_quant_config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_shards_hold_the_same_tensors(tiny: Callable, quantize: Quantize, check_export: Check) -> None:
    whole = quantize(tiny("llama"), "nvfp4", name="whole")
    sharded = quantize(tiny("llama"), "nvfp4", name="sharded", max_shard_bytes=40_000)
    check_export(tiny("llama"), sharded)
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) >= 4
    assert all((sharded / name).stat().st_size <= 40_000 for name in files)
    assert not (whole / "model.safetensors.index.json").exists()
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    ours, theirs = load_tensors(whole), load_tensors(sharded)
    assert index["weight_map"].keys() == ours.keys() == theirs.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in ours.values())
    for name, file in index["weight_map"].items():
        with safe_open(sharded / file, framework="pt") as shard:
            assert raw(shard.get_tensor(name)) == raw(ours[name])


def test_a_sharded_source_gives_the_same_export(tiny: Callable, quantize: Quantize, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype="auto").save_pretrained(source, max_shard_size="60KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    one, two = (load_tensors(quantize(d, "nvfp4", name=n)) for d, n in ((tiny("llama"), "one"), (source, "many")))
    assert {name: raw(tensor) for name, tensor in one.items()} == {name: raw(tensor) for name, tensor in two.items()}


def test_the_kv_format_changes_the_configuration_only(tiny: Callable, quantize: Quantize, check_export: Check) -> None:
    exports = {
        kv: quantize(tiny("llama"), "nvfp4", name=str(kv), kv_cache_qformat=kv) for kv in (None, "none", "fp8_cast")
    }
    for export in exports.values():
        check_export(tiny("llama"), export)
    assert weight_files(exports["none"]) == weight_files(exports["fp8_cast"]) == weight_files(exports[None])
    algos = {kv: json.loads((export / "hf_quant_config.json").read_text())["quantization"].get("kv_cache_quant_algo")
             for kv, export in exports.items()}  # fmt: skip
    assert algos == {None: "FP8", "none": None, "fp8_cast": "FP8"}
    assert "kv_cache_scheme" not in config_of(exports["none"])


# ---- recipes of the user


def recipe_file(directory: Path, *rules: str, more: str = "") -> str:
    path = directory / "mine.yaml"
    path.write_text("\n".join(["rules:", *(f"  - {rule}" for rule in rules), more]))
    return str(path)


def test_a_recipe_file_is_followed(tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path) -> None:
    """Formats may differ between groups; the last matching rule decides; the recipe's KV format counts."""
    recipe = recipe_file(
        tmp_path,
        '{pattern: "*mlp*", weight: nvfp4, input: nvfp4}',
        '{pattern: "*self_attn*", weight: fp8, input: fp8}',
        '{pattern: "model.layers.1.*", enable: false}',
        "{import: default_disabled}",
        more="kv_cache: none",
    )
    export = quantize(tiny("llama"), recipe=recipe)
    check_export(tiny("llama"), export)
    layers = {f"model.layers.{i}" for i in (0, 2)}
    mlp = {f"{layer}.mlp.{leaf}" for layer in layers for leaf in ("gate_proj", "up_proj", "down_proj")}
    attention = {f"{layer}.self_attn.{leaf}_proj" for layer in layers for leaf in "qkvo"}
    found = json.loads((export / "hf_quant_config.json").read_text())["quantization"]
    assert found["quant_algo"] == "MIXED_PRECISION"
    assert {m: layer["quant_algo"] for m, layer in found["quantized_layers"].items()} == {
        **dict.fromkeys(mlp, "NVFP4"), **dict.fromkeys(attention, "FP8"),
    }  # fmt: skip
    assert not found.get("kv_cache_quant_algo")
    tensors = load_tensors(export)
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == torch.bfloat16
    options = json.loads((export / "hf_ptq_report.json").read_text())["options"]
    assert (options["qformat"], options["recipe"]) == (None, recipe)


def test_the_option_wins_over_the_recipes_kv_format(tiny: Callable, quantize: Quantize, tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path, '{pattern: "*mlp*", weight: nvfp4}', more="kv_cache: none")
    export = quantize(tiny("llama"), recipe=recipe, kv_cache_qformat="fp8_cast")
    assert config_of(export)["kv_cache_scheme"]


def test_an_output_head_is_quantized_on_request(
    tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path
) -> None:
    recipe = recipe_file(tmp_path, '{pattern: "*", weight: fp8, input: fp8}')
    export = quantize(tiny("llama"), recipe=recipe, skip_generate=False)
    check_export(tiny("llama"), export)
    tensors = load_tensors(export)
    assert tensors["lm_head.weight"].dtype == torch.float8_e4m3fn
    assert float(tensors["lm_head.input_scale"]) > 0
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16


# ---- nothing is lost


def test_tensors_that_the_model_never_builds_are_carried(
    tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path
) -> None:
    """MTP parts and layers past num_hidden_layers: bit-identical, excluded, and told."""
    draw = torch.Generator().manual_seed(5)
    extra = {
        "model.layers.3.self_attn.q_proj.weight": torch.randn(64, 64, generator=draw, dtype=torch.bfloat16),
        "model.layers.3.mlp.down_proj.weight": torch.randn(64, 96, generator=draw, dtype=torch.bfloat16),
        "model.layers.3.eh_proj.weight": torch.randn(64, 128, generator=draw, dtype=torch.bfloat16),
        "model.layers.3.enorm.weight": torch.randn(64, generator=draw),
        "mtp.fc.weight": torch.randn(64, 128, generator=draw, dtype=torch.float16),
        "mtp.layers.0.mlp.up_proj.weight": torch.randn(96, 64, generator=draw, dtype=torch.bfloat16),
        "mtp.counts": torch.arange(7),
    }
    source = altered(tiny("llama"), tmp_path / "source", lambda tensors: tensors.update(extra))
    report = Report(verbose=False)
    export = quantize(source, "nvfp4", report=report)
    check_export(source, export)
    tensors = load_tensors(export)
    assert {name: raw(tensors[name]) for name in extra} == {name: raw(tensor) for name, tensor in extra.items()}
    excluded = set(json.loads((export / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"])
    linears = {name.removesuffix(".weight") for name, tensor in extra.items() if tensor.dim() == 2}
    assert linears <= excluded
    assert any("7 tensors that the model never builds" in text for text in report.warnings)


def test_a_hub_id_carries_over_what_a_directory_does(
    tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MTP tensors of an MoE from a snapshot in an offline cache, whose files are links to blobs."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    extra = {"mtp.fc.weight": torch.randn(64, 128, generator=torch.Generator().manual_seed(5)).bfloat16()}
    directory = altered(tiny("qwen3_moe"), tmp_path / "plain", lambda tensors: tensors.update(extra))
    repository = tmp_path / "hub" / "models--somebody--model"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    for file in directory.iterdir():
        shutil.copyfile(file, repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from_hub = quantize("somebody/model", "nvfp4", name="from_hub")
    check_export(directory, from_hub)
    from_directory = quantize(directory, "nvfp4", name="from_directory")
    ours = load_tensors(from_hub)
    assert raw(ours["mtp.fc.weight"]) == raw(extra["mtp.fc.weight"])
    assert {n: raw(t) for n, t in ours.items()} == {n: raw(t) for n, t in load_tensors(from_directory).items()}


def test_dtypes_of_unquantized_tensors_are_kept(
    tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        draw = torch.Generator().manual_seed(6)
        for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"):
            tensors[name] = torch.randn(tensors[name].shape, generator=draw)  # float32 that bfloat16 cannot hold
        tensors["model.layers.0.post_attention_layernorm.weight"] = torch.full((64,), 0.1, dtype=torch.float16)

    source = altered(tiny("llama"), tmp_path / "source", change)
    export = quantize(source, "fp8")
    check_export(source, export)
    ours, theirs = load_tensors(export), load_tensors(source)
    kept = [name for name in theirs if f"{name}_scale" not in ours]
    assert {"lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"} < set(kept)
    assert [name for name in kept if raw(ours[name]) != raw(theirs[name])] == []


@pytest.mark.parametrize("preset", ["fp8", "nvfp4", "int8_weight_only"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sources_in_other_dtypes(
    dtype: str, preset: str, tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()})

    source = altered(tiny("llama"), tmp_path / "source", change, dtype=dtype)
    export = quantize(source, preset)
    check_export(source, export)
    assert load_tensors(export)["lm_head.weight"].dtype == getattr(torch, dtype)


def test_side_files_come_byte_for_byte(tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path) -> None:
    files = {
        "modeling_mine.py": b"# remote code \xff\r\n",
        "chat_template.jinja": "{{ '\u00fc' }}\r\n".encode(),
        "code/deep/helper.py": b"x = 1\n",
        "LICENSE": b"free\n",
        # transformers would complain about this pair, and would write it anew without the temperature
        "generation_config.json": b'{"do_sample": false,   "temperature": 0.6, "top_p": 0.9, "eos_token_id": [2, 5]}',
    }
    source = altered(tiny("llama"), tmp_path / "source", lambda tensors: None)
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    (source / "pytorch_model.bin").write_bytes(b"left out")
    export = quantize(source, "fp8", skip_generate=False)
    check_export(source, export)
    tokenizer = {p.name: p.read_bytes() for p in source.glob("tokenizer*")}
    assert {name: (export / name).read_bytes() for name in (*files, *tokenizer)} == files | tokenizer
    assert not (export / "pytorch_model.bin").exists()


def test_a_tied_head_that_the_source_stores_is_kept(
    tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    source = altered(tiny("llama_tied"), tmp_path / "source", change)
    export = quantize(source, "nvfp4")
    check_export(source, export)
    assert raw(load_tensors(export)["lm_head.weight"]) == raw(load_tensors(source)["lm_head.weight"])


def test_a_tied_head_without_a_tensor_is_excluded(tiny: Callable, quantize: Quantize) -> None:
    """Servers build a head all the same; the checker, which goes by tensors, does not ask for it."""
    export = quantize(tiny("llama_tied"), "nvfp4")
    assert "lm_head.weight" not in load_tensors(export)
    excluded = json.loads((export / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert excluded == ["lm_head"]


# ---- sources with less than usual


@pytest.mark.parametrize("preview", [False, True])
def test_a_tokenizer_with_neither_pad_nor_eos(
    preview: bool, tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path
) -> None:
    source = altered(tiny("llama"), tmp_path / "source", lambda tensors: None, pad_token_id=None, eos_token_id=None)
    (source / "generation_config.json").unlink(missing_ok=True)
    for path in source.glob("tokenizer*"):
        path.unlink()
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(source)
    (tmp_path / "text.txt").write_text("some text to calibrate with, " * 40)
    report = Report(verbose=False)
    export = quantize(
        source, "nvfp4", report=report, datasets=(str(tmp_path / "text.txt"),), calib_seq=64, skip_generate=not preview
    )
    check_export(source, export)
    assert not any("preview" in text for text in report.warnings)


def test_no_tokenizer_at_all(tiny: Callable, quantize: Quantize, tmp_path: Path) -> None:
    """Rows of token ids need none; previews then show ids."""
    source = altered(tiny("llama"), tmp_path / "source", lambda tensors: None)
    for path in source.glob("tokenizer*"):
        path.unlink()
    report = Report(verbose=False)
    export = quantize(source, "nvfp4", report=report, skip_generate=False)
    assert any("no tokenizer" in text for text in report.warnings)
    assert report_of(export)["previews"]["after"].split()[0].isdigit()


def test_the_page_is_written_where_it_is_asked_for(tiny: Callable, quantize: Quantize, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "report.html"
    quantize(tiny("llama"), "nvfp4", report_html=page)
    text = page.read_text(encoding="utf-8")
    assert "Signal-to-noise of the weights" in text
    assert "model.layers.*.mlp.down_proj" in text, "the errors of all weights are in it"
    assert "dry_run" in text


def test_a_dry_run_writes_nothing(tiny: Callable, quantize: Quantize, tmp_path: Path) -> None:
    report = Report(verbose=False)
    export = quantize(tiny("llama"), "nvfp4", report=report, dry_run=True)
    assert not export.exists()
    assert list(tmp_path.iterdir()) == []
    assert report.sections["bytes"]["export_bytes"] < report.sections["bytes"]["source_bytes"]


def test_an_earlier_export_is_replaced(tiny: Callable, quantize: Quantize, check_export: Check, tmp_path: Path) -> None:
    quantize(tiny("llama"), "fp8", name="out", max_shard_bytes=40_000)
    export = quantize(tiny("llama"), "nvfp4", name="out", overwrite=True)
    check_export(tiny("llama"), export)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(report_of(export)["files"]) == sorted(str(p.relative_to(export)) for p in export.rglob("*"))


def test_the_report_tells_what_was_done(tiny: Callable, quantize: Quantize, token_rows: Path) -> None:
    export = quantize(tiny("llama"), "nvfp4")
    report = report_of(export)
    source_bytes = sum(t.numel() * t.element_size() for t in load_tensors(tiny("llama")).values())
    assert report["bytes"]["source_bytes"] == source_bytes
    assert report["bytes"]["export_bytes"] == sum(p.stat().st_size for p in export.glob("*.safetensors"))
    assert report["data"]["datasets"] == [{"name": str(token_rows), "documents": 8, "tokens": 256, "rows": 8}]
    kinds = report["signal_to_noise"]
    assert {kind: row["modules"] for kind, row in kinds.items()} == {
        f"{leaf} nvfp4": 3 for leaf in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert all(18 < row["worst dB"] <= row["dB"] < 24 for row in kinds.values())  # NVFP4 of Gaussian weights: 20.4
    stages = {stage["name"] for stage in report["stages"]}
    assert {"data", "load", "calibrate", "quantize", "export", "verify"} <= stages
