"""Bad input, through the command line: the exit code, what the message names, and that nothing is left behind.

A refusal (2) comes before any weight is loaded; a failed run (1) leaves no export and no temporary directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from tiny import altered, byte_tokenizer, load_tensors

from hf_ptq import cli, driver
from hf_ptq.export import destination

Hf = Callable[..., int]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The export path, in a directory of its own."""
    place = tmp_path / "exports"
    place.mkdir()
    return place / "out"


@pytest.fixture
def hf_ptq(token_rows: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> Hf:
    """Run the command in this process; what it says is then in `hf_ptq.said`."""

    def command(model: object, *words: object, **options: object) -> int:
        defaults = {"export_path": out, "dataset": token_rows, "device": "cpu"}
        named = [word for key, value in {**defaults, **options}.items() for word in (f"--{key}", value)]
        argv = ["--model", model, *named, "--skip_generate", "--no-verbose", "--no-durable", *words]
        capsys.readouterr()
        code = cli.main([str(word) for word in argv])
        command.said = "".join(capsys.readouterr())
        return code

    return command


@pytest.fixture
def refused(hf_ptq: Hf, out: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A request that is refused: what the message says; nothing is loaded or written."""

    def never(*_: object) -> None:
        raise AssertionError("weights are loaded for a request that is to be refused")

    def check(model: object, *words: object, **options: object) -> str:
        before = sorted(out.parent.rglob("*"))
        with monkeypatch.context() as patch:
            patch.setattr(driver, "load", never)
            assert hf_ptq(model, *words, **options) == 2, hf_ptq.said
        assert "this request cannot be carried out" in hf_ptq.said
        assert sorted(out.parent.rglob("*")) == before
        return hf_ptq.said

    return check


@pytest.fixture
def changed(tiny: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model with other tensors or configuration."""

    def make(change: Callable[[dict], object] = lambda tensors: None, model: str = "llama", **config: object) -> Path:
        return altered(tiny(model), tmp_path / "source", change, **config)

    return make


def recipe(directory: Path, *rules: str) -> Path:
    path = directory / "mine.yaml"
    path.write_text("rules:\n" + "".join(f"  - {rule}\n" for rule in rules))
    return path


# ---- the source


def test_a_path_that_is_no_checkpoint(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    assert "empty is no checkpoint: it has no config.json" in refused(tmp_path / "empty")
    assert "file.txt is a file, no checkpoint" in refused(tmp_path / "file.txt")
    assert "/no/such/place" in refused("/no/such/place")


def test_a_truncated_weight_file(refused: Callable[..., str], changed: Callable[..., Path]) -> None:
    path = changed() / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    said = refused(path.parent)
    assert "model.safetensors: truncated" in said
    assert "incomplete: " in said


@pytest.mark.parametrize("damage", [b"\xff" * 8, b"\x10" + bytes(7) + b"not json at all!"])
def test_a_corrupt_weight_file(damage: bytes, refused: Callable[..., str], changed: Callable[..., Path]) -> None:
    path = changed() / "model.safetensors"
    path.write_bytes(damage + path.read_bytes()[len(damage) :])
    assert "model.safetensors: corrupt" in refused(path.parent)


def test_an_index_that_names_missing_files(refused: Callable[..., str], changed: Callable[..., Path]) -> None:
    source = changed()
    names = dict.fromkeys(load_tensors(source), "model-00001-of-00002.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    said = refused(source)
    assert "model.safetensors.index.json" in said
    assert "model-00001-of-00002.safetensors" in said


def test_pickled_weights(refused: Callable[..., str], changed: Callable[..., Path]) -> None:
    source = changed()
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    said = refused(source)
    assert "pytorch_model.bin" in said
    assert "python -c" in said


def test_remote_code_without_the_flag(refused: Callable[..., str], changed: Callable[..., Path]) -> None:
    source = changed(model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    (source / "modeling_mine.py").write_text("raise SystemExit('remote code ran')")
    said = refused(source)
    assert "modeling_mine.Mine" in said
    assert "--trust_remote_code" in said


MISSING, RESHAPED = "model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"


def test_tensors_that_do_not_fit_the_configuration(refused: Callable[..., str], changed: Callable[..., Path]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[MISSING]
        tensors[RESHAPED] = tensors[RESHAPED][:60].clone()

    said = refused(changed(change))
    assert f"lacks 1 tensors that LlamaForCausalLM needs: {MISSING}" in said
    assert f"{RESHAPED} has shape [60, 64], the model of config.json needs [64, 64]" in said


def test_an_attention_that_there_is_not(refused: Callable[..., str], tiny: Callable[[str], Path]) -> None:
    said = refused(tiny("llama"), attn_implementation="flash_attention_9")
    assert "flash_attention_9" in said
    assert "--attn_implementation" in said


# ---- formats and recipes


def test_an_unknown_preset(refused: Callable[..., str], tiny: Callable[[str], Path]) -> None:
    said = refused(tiny("llama"), qformat="nvfp5")
    assert "'nvfp5' is no preset" in said
    assert "nearest: nvfp4" in said


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        ('{patern: "*", weight: fp8}', ("rules[0]: unknown key 'patern'", "did you mean 'pattern'?")),
        ('{pattern: "*", weight: fp9}', ("rules[0]: weight: unknown format 'fp9'", "nvfp4")),
        ('{pattern: "*", input: fp8}', ("input without weight",)),
        ("{import: nothing_here}", ("import 'nothing_here'", "no such file")),
    ],
)
def test_a_recipe_that_breaks_the_schema(
    rule: str, named: tuple[str, ...], refused: Callable[..., str], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    said = refused(tiny("llama"), recipe=recipe(tmp_path, rule))
    assert all(text in said for text in ("mine.yaml", *named)), said


def test_a_pattern_that_matches_nothing(hf_ptq: Hf, tiny: Callable[[str], Path], out: Path, tmp_path: Path) -> None:
    rules = ('{pattern: "*mlp*", weight: fp8, input: fp8}', '{pattern: "*expertz*", enable: false}')
    assert hf_ptq(tiny("llama"), recipe=recipe(tmp_path, *rules)) == 0, hf_ptq.said
    warning = "recipe mine: pattern '*expertz*' matches no module"
    assert warning in hf_ptq.said
    assert warning in json.loads((out / "hf_ptq_report.json").read_text())["warnings"]


@pytest.mark.parametrize("rules", [
    ('{pattern: "*expertz*", weight: fp8, input: fp8}',),
    ('{pattern: "*", weight: fp8, input: fp8}', '{pattern: "*", enable: false}'),
])  # fmt: skip
def test_a_recipe_that_quantizes_nothing(
    rules: tuple[str, ...], refused: Callable[..., str], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    assert "recipe mine quantizes nothing in LlamaForCausalLM" in refused(
        tiny("llama"), recipe=recipe(tmp_path, *rules)
    )


def test_a_pair_of_formats_that_no_server_knows(
    refused: Callable[..., str], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    said = refused(tiny("llama"), recipe=recipe(tmp_path, '{pattern: "*mlp*", weight: nvfp4, input: fp8}'))
    assert "the layout modelopt has no name for weights in nvfp4 with inputs in fp8" in said
    assert "--export_fmt can be fakequant" in said


def test_a_shape_that_the_format_cannot_take(
    hf_ptq: Hf, changed: Callable[..., Path], out: Path, check_export: Callable[[Path, Path], None]
) -> None:
    source = changed(narrow_mlp, intermediate_size=72)
    assert hf_ptq(source, qformat="nvfp4") == 0, hf_ptq.said
    reason = "72 inputs are no multiple of 16, as nvfp4 needs"
    assert f"3 modules (model.layers.0.mlp.down_proj ...) are left unquantized: {reason}" in hf_ptq.said
    tensors = load_tensors(out)
    assert tensors["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    check_export(source, out)


def narrow_mlp(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if ".mlp." in name:
            tensors[name] = (tensor[:, :72] if "down_proj" in name else tensor[:72]).clone()


@pytest.mark.parametrize(("rule", "shown"), [
    ('{pattern: "*.q_proj", weight: fp8, input: fp8}', "q_proj: fp8/fp8"),
    ('{pattern: "*.q_proj", enable: false}', "q_proj: unquantized"),
])  # fmt: skip
def test_a_fused_group_that_would_be_split(
    rule: str, shown: str, refused: Callable[..., str], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    said = refused(tiny("llama"), recipe=recipe(tmp_path, '{pattern: "*self_attn*", weight: nvfp4}', rule))
    assert f"model.layers.0.self_attn.{shown}" in said
    assert "model.layers.0.self_attn.k_proj: nvfp4/None" in said


# ---- data


@pytest.mark.parametrize(("text", "named"), [
    ('{"text": "fine"}\n{"text": 3}\n{"text": "fine"}\n{"txet": "x"}\n', ("line 2", "`text` is a string", "line 4")),
    ('{"text": "fine"}\n{"text": \n', ("line 2: not JSON",)),
    ('{"input_ids": [5, 999]}\n', ("line 1", "999")),
    ('{"text": "  "}\n', ("no usable rows",)),
])  # fmt: skip
def test_data_that_cannot_be_used(
    text: str, named: tuple[str, ...], refused: Callable[..., str], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    said = refused(tiny("llama"), dataset=tmp_path / "rows.jsonl")
    assert all(part in said for part in ("rows.jsonl", *named)), said


def test_an_unknown_data_set(refused: Callable[..., str], tiny: Callable[[str], Path]) -> None:
    assert "cnn_dailymail" in refused(tiny("llama"), dataset="cnn_dayly_mail")


def test_text_without_a_tokenizer(refused: Callable[..., str], changed: Callable[..., Path]) -> None:
    source = changed()
    for path in source.glob("tokenizer*"):
        path.unlink()
    assert "tokenizer" in refused(source, dataset="pydoc")


def test_a_tokenizer_with_neither_pad_nor_eos_works(hf_ptq: Hf, changed: Callable[..., Path], tmp_path: Path) -> None:
    source = changed(pad_token_id=None, eos_token_id=None)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(source)
    (tmp_path / "text.txt").write_text("a text for calibration " * 20)
    assert hf_ptq(source, dataset=tmp_path / "text.txt", calib_seq=32, calib_size=4) == 0, hf_ptq.said


# ---- the export path


def files_below(directory: Path) -> Mapping[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_an_export_path_that_exists(hf_ptq: Hf, refused: Callable[..., str], tiny: Callable, out: Path) -> None:
    assert hf_ptq(tiny("llama")) == 0, hf_ptq.said
    before = files_below(out)
    said = refused(tiny("llama"))
    assert str(out) in said
    assert "add --overwrite" in said
    assert files_below(out) == before
    assert hf_ptq(tiny("llama"), "--overwrite") == 0, hf_ptq.said


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_a_directory_that_holds_no_earlier_export(
    words: tuple[str, ...], refused: Callable[..., str], tiny: Callable[[str], Path], out: Path
) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("ten years")
    assert "holds no earlier export" in refused(tiny("llama"), *words)
    assert (out / "thesis.txt").read_text() == "ten years"


@pytest.mark.parametrize(("where", "named"), [
    (".", "is the source itself"), ("sub/out", "lies inside the source"), ("..", "contains the source"),
])  # fmt: skip
def test_an_export_path_in_or_around_the_source(
    where: str, named: str, refused: Callable[..., str], changed: Callable[..., Path]
) -> None:
    source = changed()
    before = files_below(source)
    assert named in refused(source, "--overwrite", export_path=source / where)
    assert files_below(source) == before


def test_an_export_path_that_is_not_writable(
    refused: Callable[..., str], tiny: Callable[[str], Path], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(destination, "_cannot_write", lambda home: f"{home} may not be written")  # root may write all
    said = refused(tiny("llama"))
    assert f"--export_path {out} cannot be written: {out.parent} may not be written" in said


def test_a_disk_with_too_little_room(
    refused: Callable[..., str], tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = os.statvfs("/")
    few = os.statvfs_result((room.f_bsize, 1000, 1_000_000, 20, 20, *tuple(room)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: few)
    said = refused(tiny("llama"))
    assert "the export needs" in said
    assert "free" in said


# ---- the machine


def test_a_cuda_device_that_is_not_there(refused: Callable[..., str], tiny: Callable[[str], Path]) -> None:
    assert "--device cuda:63" in refused(tiny("llama"), device="cuda:63")


# ---- runs that fail


def poke(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [
    "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight",
])  # fmt: skip
def test_weights_with_nan_or_infinity(
    name: str, value: float, hf_ptq: Hf, changed: Callable[..., Path], out: Path
) -> None:
    assert hf_ptq(changed(poke(name, value)), qformat="w4a16_nvfp4") == 1
    assert f"the run failed: {name} holds NaN or infinity" in hf_ptq.said
    assert list(out.parent.iterdir()) == []


def test_one_experts_weight_with_nan(hf_ptq: Hf, changed: Callable[..., Path], out: Path) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert hf_ptq(changed(poke(name, float("nan")), model="qwen3_moe")) == 1
    assert f"{name} holds NaN or infinity" in hf_ptq.said
    assert "experts.4.up_proj" not in hf_ptq.said, "only the damaged expert is named"
    assert list(out.parent.iterdir()) == []


def test_activations_that_overflow(hf_ptq: Hf, changed: Callable[..., Path], out: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] *= 1e20
        tensors["model.layers.1.mlp.gate_proj.weight"] *= 1e20

    assert hf_ptq(changed(change)) == 1
    assert "model.layers.1.mlp.down_proj held NaN or infinity during calibration" in hf_ptq.said
    assert list(out.parent.iterdir()) == []


def test_a_disk_that_fills_up_while_writing(
    hf_ptq: Hf, tiny: Callable[[str], Path], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_ptq.checkpoint.shard_file.os.pwrite", full)
    assert hf_ptq(tiny("llama"), qformat="w4a16_nvfp4") == 1
    assert "No space left on device" in hf_ptq.said
    assert list(out.parent.iterdir()) == []


def test_an_earlier_export_survives_a_failed_run(hf_ptq: Hf, tiny: Callable, changed: Callable, out: Path) -> None:
    assert hf_ptq(tiny("llama")) == 0, hf_ptq.said
    before = files_below(out)
    assert hf_ptq(changed(poke("lm_head.weight", float("nan"))), "--overwrite") == 1
    assert files_below(out) == before
    assert [path.name for path in out.parent.iterdir()] == [out.name]
