"""Filling by pinned buffers and CUDA streams gives the tensors that transformers loads, and holds little memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import open_source
from hf_ptq.errors import RunError
from hf_ptq.model import fill
from hf_ptq.model.build import build_meta_model, finish_loading
from hf_ptq.model.fill import Filler
from hf_ptq.model.units import split_units
from hf_ptq.report import Report

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
FAMILIES = ("llama", "llama_tied", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2")
Tiny = Callable[[str], Path]


def filled(directory: Path, threads: int = 8) -> tuple[PreTrainedModel, int, int]:
    """The model on the GPU, the bytes read, and how many pinned buffers there were."""
    device = torch.device("cuda", torch.cuda.current_device())
    source = open_source(str(directory), None, False, Report(Console(quiet=True), verbose=False))
    meta = build_meta_model(source)
    units = [unit for unit in split_units(meta.model, meta.placements) if not unit.is_carried]
    with SourceReader(source) as reader, Filler(meta, reader, device, threads) as filler:
        for unit in filler.fill(units, lambda _: None):
            names = {meta.placements[name].parameter for name in unit.tensors}
            # Work launched at once on the current stream sees the values.
            sums = [meta.model.get_parameter(n).float().abs().sum() for n in names if n and n.endswith("weight")]
            assert all(torch.stack(sums).isfinite().tolist())
        lanes = [filler._lanes.get() for _ in range(2 * threads)]
        for lane in lanes:
            filler._lanes.put(lane)
        finish_loading(meta, device)
        assert all(tensor.is_cuda for tensor in (*meta.model.parameters(), *meta.model.buffers()))
        return meta.model, reader.bytes_read, sum(lane is not None for lane in lanes)


def assert_same(ours: PreTrainedModel, directory: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(directory, device_map={"": torch.cuda.current_device()}).eval()
    state = ours.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert (state[name].dtype, state[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(state[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    ids = torch.arange(3, 43, device=theirs.device).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(ours(ids, use_cache=False).logits, theirs(ids, use_cache=False).logits)


def stored_as(directory: Path, dtype: torch.dtype) -> Path:
    """The checkpoint in `directory` with values that are no bf16 numbers, in another dtype than config.json's."""
    torch.manual_seed(3)
    tensors = load_file(directory / "model.safetensors")
    noisy = {n: (t.float() * (1 + 1e-3 * torch.randn(t.shape))).to(dtype) for n, t in tensors.items()}
    save_file(noisy, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_from_pretrained(tiny: Tiny, name: str) -> None:
    model, bytes_read, _ = filled(tiny(name))
    assert_same(model, tiny(name))
    assert bytes_read == sum(t.nbytes for t in load_file(tiny(name) / "model.safetensors").values())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_other_dtype_in_the_files(tmp_path: Path, name: str, stored: torch.dtype) -> None:
    directory = stored_as(save_tiny(name, tmp_path), stored)
    assert_same(filled(directory)[0], directory)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_few_buffers_carry_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype) -> None:
    """Buffers are used again and again, and never before their copies are done."""
    monkeypatch.setattr(fill, "CHUNK", 1 << 12)
    monkeypatch.setattr(fill, "READ_AHEAD", 1 << 16)
    directory = stored_as(save_tiny("qwen3_moe_wide", tmp_path), stored)
    for _ in range(5):
        model, _, buffers = filled(directory, threads=4)
        assert buffers <= 8
        assert_same(model, directory)


def test_device_memory_is_the_model(tmp_path: Path) -> None:
    """With another dtype in the files: beside the model at most a chunk per buffer's stream."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 64, "vocab_size": 8192}
    directory = save_tiny("qwen3_moe", tmp_path, **sizes)
    stored_as(directory, torch.float32)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model, _, buffers = filled(directory, threads=2)
    size = sum(p.nbytes for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < size + buffers * fill.CHUNK + size // 3


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    directory = save_tiny("qwen3_moe", tmp_path)
    device = torch.device("cuda", torch.cuda.current_device())
    source = open_source(str(directory), None, False, Report(Console(quiet=True), verbose=False))
    meta = build_meta_model(source)
    units = [unit for unit in split_units(meta.model, meta.placements) if not unit.is_carried]
    cut = source.tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    with (directory / cut.file).open("r+b") as file:
        file.truncate(cut.offset + 10)
    with (
        SourceReader(source) as reader,
        Filler(meta, reader, device) as filler,
        pytest.raises(RunError, match=r"ended inside model\.layers\.1\.mlp\.experts\.3\.up_proj"),
    ):
        list(filler.fill(units, lambda _: None))
