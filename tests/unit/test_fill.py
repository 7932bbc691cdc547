"""Filling by byte ranges gives the model that transformers loads: for every family, dtype, sharding and share."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_ptq.checkpoint.slices import SourceReader
from hf_ptq.checkpoint.source import Source, open_source
from hf_ptq.errors import RunError
from hf_ptq.model import fill
from hf_ptq.model.build import MetaModel, build_meta_model, finish_loading, load_unit
from hf_ptq.model.fill import Filler
from hf_ptq.model.ranges import lay_out_parameters
from hf_ptq.model.units import Unit, split_units
from hf_ptq.report import Report

FAMILIES = ("llama", "llama_tied", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2")
STACKED = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2")
CPU = torch.device("cpu")
Tiny = Callable[[str], Path]


def open_meta(directory: Path) -> tuple[Source, MetaModel, list[Unit]]:
    source = open_source(str(directory), None, False, Report(Console(quiet=True), verbose=False))
    meta = build_meta_model(source)
    return source, meta, [unit for unit in split_units(meta.model, meta.placements) if not unit.is_carried]


def filled(directory: Path, **options) -> tuple[PreTrainedModel, int]:
    """The model filled by ranges, and the bytes that were read."""
    source, meta, units = open_meta(directory)
    done: list[int] = []
    with SourceReader(source) as reader, Filler(meta, reader, CPU, **options) as filler:
        assert all(filler.is_fast(name) for unit in units for name in unit.tensors)
        assert list(filler.fill(units, done.append)) == units
        finish_loading(meta, CPU)
        assert sum(done) == sum(source.tensors[name].num_bytes for unit in units for name in unit.tensors)
        return meta.model, reader.bytes_read


def assert_same(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    assert_same_state(ours.state_dict(), theirs.state_dict())
    ids = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(ours(ids, use_cache=False).logits, theirs.eval()(ids, use_cache=False).logits)


def assert_same_state(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


def with_dtypes(source: Path, directory: Path, dtype_of: Callable[[str], torch.dtype]) -> Path:
    """A copy whose tensors are stored in other dtypes than config.json declares; the values are no bf16 numbers."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    torch.manual_seed(3)
    noisy = {n: (t.float() * (1 + 1e-3 * torch.randn(t.shape))).to(dtype_of(n)) for n, t in tensors.items()}
    save_file(noisy, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_from_pretrained(tiny: Tiny, name: str) -> None:
    model, bytes_read = filled(tiny(name))
    assert_same(model, AutoModelForCausalLM.from_pretrained(tiny(name)))
    source = open_meta(tiny(name))[0]
    assert bytes_read == source.total_bytes


@pytest.mark.parametrize("name", ["llama_tied", "deepseek_v3", "minimax_m2"])
def test_leaves_what_the_loader_leaves(tiny: Tiny, name: str) -> None:
    """Kinds of tensors, gradients and marks: the steps after loading see no difference."""
    ours, _ = filled(tiny(name))
    source, meta, units = open_meta(tiny(name))
    with SourceReader(source) as reader:
        for unit in units:
            load_unit(meta, {n: reader.tensor(n) for n in unit.tensors}, CPU)
        finish_loading(meta, CPU)

    def traits(model: PreTrainedModel) -> dict[str, tuple]:
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
        return {n: (type(t), t.requires_grad, t.is_contiguous(), t.dtype, t.device) for n, t in tensors}

    assert traits(ours) == traits(meta.model)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_filled_tensors_are_not_initialised_again(tiny: Tiny, name: str) -> None:
    """The mark on them is what protects them: one without it is drawn anew."""
    source, meta, units = open_meta(tiny(name))
    with SourceReader(source) as reader, Filler(meta, reader, CPU) as filler:
        list(filler.fill(units, lambda _: None))
    before = {n: t.clone() for n, t in meta.model.state_dict().items()}
    assert all(t._is_hf_initialized for t in meta.model.state_dict(keep_vars=True).values())
    finish_loading(meta, CPU)
    assert_same_state(meta.model.state_dict(), before)
    unmarked = meta.model.get_parameter("model.embed_tokens.weight")
    unmarked._is_hf_initialized = False
    for module in meta.model.modules():
        module._is_hf_initialized = False
    finish_loading(meta, CPU)
    assert not torch.equal(unmarked, before["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "minimax_m2"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_other_dtype_in_the_files(tiny: Tiny, tmp_path: Path, name: str, stored: torch.dtype) -> None:
    directory = with_dtypes(tiny(name), tmp_path / "source", lambda _: stored)
    model, bytes_read = filled(directory)
    assert model.dtype == torch.bfloat16
    assert_same(model, AutoModelForCausalLM.from_pretrained(directory))
    assert bytes_read == open_meta(directory)[0].total_bytes


def test_some_experts_in_another_dtype(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "CHUNK", 1000)
    wide = torch.float32
    directory = with_dtypes(tiny("mixtral"), tmp_path / "s", lambda n: wide if ".3.w2" in n else torch.bfloat16)
    assert_same(filled(directory)[0], AutoModelForCausalLM.from_pretrained(directory))


@pytest.mark.parametrize("chunk", [104, 1000, 1 << 20])
def test_chunks_of_any_size(tiny: Tiny, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are cut into many reads, or many are read at once; units wait for each other or run ahead."""
    monkeypatch.setattr(fill, "CHUNK", chunk)
    monkeypatch.setattr(fill, "READ_AHEAD", chunk * 50)
    model, bytes_read = filled(tiny("qwen3_moe"), threads=3)
    assert_same(model, AutoModelForCausalLM.from_pretrained(tiny("qwen3_moe")))
    assert bytes_read == open_meta(tiny("qwen3_moe"))[0].total_bytes


def test_reads_follow_the_files(tiny: Tiny) -> None:
    """Adjacent tensors are one read; a whole model in one file is one, its tensors in the order of their bytes."""
    source, meta, _ = open_meta(tiny("glm4_moe"))
    ranges = [r for layout in lay_out_parameters(meta, source.tensors).values() for r in layout.ranges]
    ((*pieces,),) = fill._cut((r, torch.empty(r.count, dtype=fill.TORCH_DTYPES[r.entry.dtype])) for r in ranges)
    assert [piece.offset for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert sum(piece.num_bytes for piece in pieces) == source.total_bytes


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_several_shards(tiny: Tiny, tmp_path: Path, name: str) -> None:
    AutoModelForCausalLM.from_pretrained(tiny(name)).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert_same(filled(tmp_path)[0], AutoModelForCausalLM.from_pretrained(tiny(name)))


# ---- shares


def filled_shares(directory: Path, held_of: Callable[[MetaModel], dict[str, range]]) -> dict[str, torch.Tensor]:
    """Parameters as one rank holds them; nothing is read but what is held, and the progress counts just that."""
    source, meta, units = open_meta(directory)
    held = held_of(meta)
    done: list[int] = []
    with SourceReader(source) as reader, Filler(meta, reader, CPU, held=held) as filler:
        total = filler.total_bytes(units)
        list(filler.fill(units, done.append))
        state = {n: t.clone() for n, t in meta.model.state_dict().items() if not t.is_meta}
        stored = source.tensors.values()
        size = {meta.placements[e.name].parameter: fill.TORCH_DTYPES[e.dtype].itemsize for e in stored}
        assert reader.bytes_read == sum(done) == total == sum(t.numel() * size[n] for n, t in state.items())
    return state


def stacks_of(meta: MetaModel) -> set[str]:
    return {p.parameter for p in meta.placements.values() if p.pattern is not None and p.parameter is not None}


@pytest.mark.parametrize("name", STACKED)
def test_a_share_of_the_experts(tiny: Tiny, name: str) -> None:
    """Experts [2, 5) alone: their rows of the stacks, and everything else whole."""
    shares = filled_shares(tiny(name), lambda meta: dict.fromkeys(stacks_of(meta), range(2, 5)))
    stacks, seen = stacks_of(open_meta(tiny(name))[1]), 0
    for parameter, whole in AutoModelForCausalLM.from_pretrained(tiny(name)).state_dict().items():
        assert torch.equal(shares[parameter], whole[2:5] if parameter in stacks else whole), parameter
        assert shares[parameter].dtype == whole.dtype
        seen += parameter in stacks
    assert seen == len(stacks) > 0


@pytest.mark.parametrize("name", ["llama_tied", "deepseek_v3"])
def test_shares_of_rows_make_up_the_whole(tiny: Tiny, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every parameter as FSDP2 cuts it for 13 ranks: the last ones have less, or nothing."""
    monkeypatch.setattr(fill, "CHUNK", 1000)
    source, meta, _ = open_meta(tiny(name))
    rows = {n: range(t.shape[0]) for n, t in meta.model.state_dict().items()}
    parts: dict[str, list[torch.Tensor]] = {}
    with SourceReader(source) as reader:
        for rank in range(13):
            sizes = {n: -(-len(all_rows) // 13) for n, all_rows in rows.items()}
            held = {n: all_rows[rank * sizes[n] : (rank + 1) * sizes[n]] for n, all_rows in rows.items()}
            for parameter, layout in lay_out_parameters(meta, source.tensors, held).items():
                value = torch.empty(layout.shape, dtype=layout.dtype)
                for chunk in fill._cut((part, value.view(-1)[part.start : part.stop]) for part in layout.ranges):
                    fill._read_in_place(reader, chunk)
                parts.setdefault(parameter, []).append(value)
        assert reader.bytes_read == source.total_bytes, "no byte is read twice"
    assert min(len(part) for shares in parts.values() for part in shares) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tiny(name)).state_dict()
    assert_same_state({n: torch.cat(shares) for n, shares in parts.items()}, {n: theirs[n] for n in parts})
    assert theirs.keys() - parts.keys() == ({"lm_head.weight"} if name == "llama_tied" else set())


def test_a_share_of_one_plain_matrix(tiny: Tiny) -> None:
    """Other parameters are not touched by it, and a dtype of its own in the file makes no difference."""
    name = "model.layers.1.self_attn.q_proj.weight"
    shares = filled_shares(tiny("llama"), lambda _: {name: range(5, 11)})
    whole = AutoModelForCausalLM.from_pretrained(tiny("llama")).state_dict()
    assert_same_state(shares, {**whole, name: whole[name][5:11]})


def test_a_share_in_another_dtype(tiny: Tiny, tmp_path: Path) -> None:
    directory = with_dtypes(tiny("mixtral"), tmp_path / "source", lambda _: torch.float32)
    name, stack = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.experts.gate_up_proj"
    shares = filled_shares(directory, lambda _: {name: range(5, 11), stack: range(7, 8)})
    whole = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert_same_state(shares, {**whole, name: whole[name][5:11], stack: whole[stack][7:8]})


def test_what_ranges_cannot_fill_goes_through_the_loader(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    source, meta, units = open_meta(tiny("qwen3_moe"))
    meta = dataclasses.replace(meta, stacking={})
    asked: list[str] = []

    def spy(meta: MetaModel, tensors: dict, device: torch.device) -> None:
        asked.extend(tensors)
        load_unit(meta, tensors, device)

    monkeypatch.setattr(fill, "load_unit", spy)
    done: list[int] = []
    with SourceReader(source) as reader, Filler(meta, reader, CPU) as filler:
        list(filler.fill(units, done.append))
        finish_loading(meta, CPU)
        assert not filler.is_fast(asked[0])
    assert set(asked) == {name for name in source.tensors if ".experts." in name}
    assert sum(done) == source.total_bytes
    assert_same(meta.model, AutoModelForCausalLM.from_pretrained(tiny("qwen3_moe")))


def test_a_stack_with_a_missing_expert_is_never_fast(tiny: Tiny) -> None:
    """The model is refused before (model/build.py); a share of the experts must not hide a hole in the others."""
    source, meta, _ = open_meta(tiny("qwen3_moe"))
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    del meta.placements[gone]
    for share in (range(8), range(2), range(4, 8)):
        layouts = lay_out_parameters(meta, source.tensors, dict.fromkeys(stacks_of(meta), share))
        assert "model.layers.1.mlp.experts.gate_up_proj" not in layouts
        assert "model.layers.0.mlp.experts.gate_up_proj" in layouts


def test_a_truncated_file_is_named(tiny: Tiny, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny("qwen3_moe"), tmp_path / "source")
    source, meta, units = open_meta(directory)
    cut = source.tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    with (directory / cut.file).open("r+b") as file:
        file.truncate(cut.offset + 10)
    with (
        SourceReader(source) as reader,
        Filler(meta, reader, CPU) as filler,
        pytest.raises(RunError, match=r"model\.safetensors ended inside model\.layers\.1\.mlp\.experts\.3\.up_proj"),
    ):
        list(filler.fill(units, lambda _: None))


@pytest.mark.parametrize("stop_at", ["disk", "caller"])
def test_a_failure_ends_every_thread(tiny: Tiny, stop_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk names file and tensor; whoever stops in the middle leaves no read behind."""
    source, meta, units = open_meta(tiny("mixtral"))
    monkeypatch.setattr(fill, "CHUNK", 1 << 10)
    monkeypatch.setattr(fill, "READ_AHEAD", 1 << 14)
    read_into = SourceReader.read_into

    def broken(self: SourceReader, view: memoryview, file: str, offset: int) -> int:
        if stop_at == "disk" and offset > 100_000:
            raise OSError(5, "Input/output error")
        return read_into(self, view, file, offset)

    monkeypatch.setattr(SourceReader, "read_into", broken)
    wanted = {"disk": (RunError, r"model\.safetensors: cannot read model\..*Input/output error")}
    error, match = wanted.get(stop_at, (KeyError, "enough"))
    with SourceReader(source) as reader:
        filler = Filler(meta, reader, CPU)

        def use() -> None:
            with filler:
                for _ in filler.fill(units, lambda _: None):
                    if stop_at == "caller":
                        raise KeyError("enough")

        with pytest.raises(error, match=match):
            use()
        assert not [thread for thread in filler._pool._threads if thread.is_alive()]


MEASURE = """
import sys, threading, time, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_fill as t
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
source, meta, units = t.open_meta(Path(sys.argv[1]))
before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())
thread = threading.Thread(target=watch); thread.start()
with t.SourceReader(source) as reader, t.Filler(meta, reader, t.CPU) as filler:
    for _ in filler.fill(units, lambda n: None):
        pass
t.finish_loading(meta, t.CPU)
done.set(); thread.join()
print(max(peak, anonymous()) - before, source.total_bytes)
"""


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
def test_host_memory_is_the_model(tmp_path: Path, stored: torch.dtype) -> None:
    """Anonymous memory: the model, and with another dtype in the files a chunk per thread."""
    from tiny import save_tiny

    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 32, "vocab_size": 8192}
    directory = save_tiny("qwen3_moe", tmp_path / "source", dtype=stored, **sizes)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    command = [sys.executable, "-c", MEASURE, str(directory), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, in_files = map(int, done.stdout.split())
    model = in_files * 2 // stored.itemsize
    assert model > 150 << 20
    slack = 24 << 20 if stored == torch.bfloat16 else 8 * fill.CHUNK + (24 << 20)
    assert peak < model + slack, f"{peak >> 20} MiB for a model of {model >> 20} MiB"
