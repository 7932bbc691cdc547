"""Bytes that the writer puts into files, and what it does when something goes wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from hf_ptq.checkpoint import tensor_bytes
from hf_ptq.checkpoint import writer as writer_module
from hf_ptq.checkpoint.dtypes import SAFETENSORS_DTYPES
from hf_ptq.checkpoint.shards import TensorPlan, lay_out
from hf_ptq.checkpoint.writer import ShardWriter
from hf_ptq.errors import RunError


def plan_of(name: str, tensor: torch.Tensor) -> TensorPlan:
    return TensorPlan(name, SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape))


def raw(tensor: torch.Tensor) -> bytes:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return copy.reshape(-1).view(torch.uint8).numpy().tobytes()


def read_all(folder, shards) -> dict[str, torch.Tensor]:
    found = {}
    for shard in shards:
        with safe_open(folder / shard.file, framework="pt") as f:
            found |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  (safe_open is no dict)
    return found


def open_files(folder) -> list[str]:
    """Files below `folder` that this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(str(link.readlink()))
    return [path for path in found if path.startswith(str(folder))]


def every_dtype() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {}
    for dtype, name in SAFETENSORS_DTYPES.items():
        base = torch.randint(0, 2 if dtype is torch.bool else 100, (7, 12)).to(dtype)
        found |= {f"{name}.matrix": base, f"{name}.scalar": base[3, 4], f"{name}.empty": base[:0]}
        found |= {f"{name}.transposed": base.T, f"{name}.column": base[:, 3], f"{name}.strided": base[1::2, ::3]}
    found["nan"] = torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16)
    found["one of an expanded tensor"] = torch.tensor(2.5).expand(4)[2]
    found["one element, stride 0"] = torch.arange(9.0).as_strided((1, 1), (0, 0), 5)
    found["one row of many"] = torch.randn(6, 10).bfloat16()[3]
    found["expanded"] = torch.tensor([1.5]).expand(7)
    found["parameter"] = torch.nn.Parameter(torch.randn(3, 5))
    return found


@pytest.mark.parametrize("max_bytes", [2000, 10**9])
def test_every_dtype_shape_and_stride_byte_for_byte(tmp_path, max_bytes):
    tensors = every_dtype()
    shards = lay_out([plan_of(n, t) for n, t in tensors.items()], max_bytes)
    names = list(tensors)
    random.Random(1).shuffle(names)
    with ShardWriter(tmp_path, shards) as out:
        for name in names:
            out.write(name, tensors[name])
        checksums = out.finish(durable=True)
    seen = read_all(tmp_path, shards)
    assert set(seen) == set(tensors) == set(checksums)
    for name, tensor in tensors.items():
        assert seen[name].shape == tensor.shape
        assert seen[name].dtype == tensor.dtype
        assert raw(seen[name]) == raw(tensor.detach()), name
        assert checksums[name] == zlib.crc32(raw(tensor.detach())), name
    assert out.fsync_seconds > 0


def test_large_tensors_in_pieces_and_several_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_bytes, "PIECE_BYTES", 1000)
    monkeypatch.setattr(writer_module, "BATCH_BYTES", 1500)
    torch.manual_seed(1)
    sizes = [random.Random(i).randrange(9000) for i in range(80)]
    tensors = {f"t{i}": torch.randint(0, 255, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    shards = lay_out([plan_of(n, t) for n, t in tensors.items()], 20_000)
    with ShardWriter(tmp_path, shards, threads=5, max_queued_bytes=10_000) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)
        checksums = out.finish(durable=False)
    seen = read_all(tmp_path, shards)
    for name, tensor in tensors.items():
        assert torch.equal(seen[name], tensor), name
        assert checksums[name] == zlib.crc32(raw(tensor))


@pytest.mark.parametrize("max_bytes", [1500, 10**9])
@pytest.mark.parametrize(("piece", "stack"), [(7, 64), (100, 1000), (4 << 20, 16 << 20)])
def test_stacks_are_cut_into_their_tensors(tmp_path, monkeypatch, max_bytes, piece, stack):
    monkeypatch.setattr(tensor_bytes, "PIECE_BYTES", piece)
    monkeypatch.setattr(writer_module, "STACK_BYTES", stack)
    torch.manual_seed(3)
    stacks = {
        "weight": torch.randint(0, 255, (9, 6, 8), dtype=torch.uint8),
        "transposed": torch.randn(5, 9, 4).permute(1, 2, 0).bfloat16(),
        "scalar": torch.randn(9),
        "same": torch.tensor([2.5]).expand(9),
        "empty": torch.zeros(9, 0, 3),
        "single": torch.randn(1, 3, 3),
    }
    tensors = {f"{e}.{kind}": values[e] for kind, values in stacks.items() for e in range(len(values))}
    order = sorted(tensors, key=lambda name: (int(name[0]), name))  # an expert's tensors lie together, as in an export
    shards = lay_out([plan_of(name, tensors[name]) for name in order], max_bytes)
    with ShardWriter(tmp_path, shards) as out:
        for kind, values in stacks.items():
            out.write_stack([f"{e}.{kind}" for e in range(len(values))], values)
        out.write_stack([], torch.zeros(0, 3))
        with pytest.raises(ValueError, match=r"2 names for a stack of 3 tensors, the first \['a'\]"):
            out.write_stack(["a", "b"], torch.zeros(3, 2))
        checksums = out.finish(durable=False)
        assert open_files(tmp_path) == []
    seen = read_all(tmp_path, shards)
    assert set(seen) == set(tensors) == set(checksums)
    for name, tensor in tensors.items():
        assert raw(seen[name]) == raw(tensor), name
        assert checksums[name] == zlib.crc32(raw(tensor)), name


def test_a_stack_of_the_wrong_kind_is_named_by_its_first_tensor(tmp_path):
    plans = [TensorPlan(name, "F32", (2,)) for name in ("a", "b")]
    with ShardWriter(tmp_path, lay_out(plans, 100)) as out, pytest.raises(RunError, match=r"a: .* F32 \[2\], .* \[3\]"):
        out.write_stack(["a", "b"], torch.zeros(2, 3))


def test_copied_bytes_are_those_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_bytes, "PIECE_BYTES", 700)
    data = random.Random(2).randbytes(5000)
    (tmp_path / "source").write_bytes(data)
    (tmp_path / "out").mkdir()
    plans = [TensorPlan("a", "U8", (3000,)), TensorPlan("b", "BF16", (5, 7)), TensorPlan("e", "F32", (0, 3))]
    (shard,) = lay_out(plans, 10**6)
    with ShardWriter(tmp_path / "out", [shard]) as out:
        out.copy("a", tmp_path / "source", 123)
        out.copy("b", tmp_path / "source", 4001)
        out.copy("e", tmp_path / "source", 0)
        checksums = out.finish(durable=False)
    written = (tmp_path / "out" / shard.file).read_bytes()
    assert written[shard.offsets["a"] :][:3000] == data[123:3123]
    assert written[shard.offsets["b"] :][:70] == data[4001:4071]
    assert checksums == {"a": zlib.crc32(data[123:3123]), "b": zlib.crc32(data[4001:4071]), "e": 0}


def test_files_have_header_and_size_before_any_tensor(tmp_path):
    plans = [TensorPlan("a", "F32", (1000,)), TensorPlan("b", "F32", (1000,))]
    shards = lay_out(plans, 4500)
    with ShardWriter(tmp_path, shards):
        for shard in shards:
            data = (tmp_path / shard.file).read_bytes()
            assert data == shard.header + bytes(4000)


def test_two_writers_share_a_layout(tmp_path):
    """Each makes and writes the files that are its own, and knows no tensor of the other's."""
    tensors = {f"t{i}": torch.full((100,), i, dtype=torch.uint8) for i in range(10)}
    owners = {name: number % 2 for number, name in enumerate(tensors)}
    shards = lay_out([plan_of(n, t) for n, t in tensors.items()], 600, owners)
    assert [shard.owner for shard in shards] == [0, 0, 1, 1]
    sums = {}
    for rank in (1, 0):
        own = [shard for shard in shards if shard.owner == rank]
        with ShardWriter(tmp_path, own) as out:
            assert {path.name for path in tmp_path.iterdir()} == {s.file for s in shards if s.owner >= rank}
            with pytest.raises(RunError, match=f"t{1 - rank}: not among the tensors that this writer was to write"):
                out.write(f"t{1 - rank}", tensors[f"t{1 - rank}"])
            for name in (name for name, owner in owners.items() if owner == rank):
                out.write(name, tensors[name])
            sums |= out.finish(durable=False)
            with pytest.raises(RunError, match="closed"):
                out.write(f"t{rank}", tensors[f"t{rank}"])
    assert set(sums) == set(tensors)
    for name, seen in read_all(tmp_path, shards).items():
        assert torch.equal(seen, tensors[name])
        assert sums[name] == zlib.crc32(raw(tensors[name]))


def test_a_writer_without_files_has_nothing_to_do(tmp_path):
    """A rank may own nothing."""
    with ShardWriter(tmp_path, []) as out:
        out.write_stack([], torch.zeros(0, 3))
        assert out.finish(durable=True) == {}
    assert list(tmp_path.iterdir()) == []


def test_missing_and_doubled_tensors_are_named_together(tmp_path):
    plans = [TensorPlan(name, "U8", (4,)) for name in ("written", "doubled", "lost", "lost too")]
    with ShardWriter(tmp_path, lay_out(plans, 10**6)) as out:
        out.write("written", torch.zeros(4, dtype=torch.uint8))
        out.write("doubled", torch.zeros(4, dtype=torch.uint8))
        out.write("doubled", torch.ones(4, dtype=torch.uint8))
        with pytest.raises(RunError) as caught:
            out.finish(durable=False)
    assert [str(p) for p in caught.value.problems] == [
        "2 planned tensors never written: lost, lost too",
        "1 planned tensors written twice: doubled",
    ]


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.zeros(3, 2), "F32 \\[3, 2\\]"),
        (torch.zeros(2, 3, dtype=torch.bfloat16), "BF16 \\[2, 3\\]"),
        (torch.zeros(2, 3, device="meta"), "F32 \\[2, 3\\] on device meta"),
    ],
)
def test_a_tensor_that_is_not_the_planned_one(tmp_path, tensor, found):
    with ShardWriter(tmp_path, lay_out([TensorPlan("w", "F32", (2, 3))], 100)) as out:
        with pytest.raises(RunError, match=f"w: the layout has F32 \\[2, 3\\], the tensor to write is {found}"):
            out.write("w", tensor)
        with pytest.raises(RunError, match="other: not among the tensors"):
            out.write("other", tensor)


def test_a_full_disk_stops_the_writer_and_names_file_and_cause(tmp_path, monkeypatch):
    real, count = os.pwrite, [0]

    def pwrite(descriptor, data, position):
        count[0] += 1
        if count[0] > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, position)

    plans = [TensorPlan(f"t{i}", "U8", (1000,)) for i in range(50)]
    (shard,) = lay_out(plans, 10**6)
    monkeypatch.setattr(os, "pwrite", pwrite)
    with ShardWriter(tmp_path, [shard], threads=2, max_queued_bytes=3000) as out:

        def write_all():
            for plan in plans:
                out.write(plan.name, torch.zeros(1000, dtype=torch.uint8))

        with pytest.raises(RunError, match=r"model\.safetensors: cannot write t\d+: No space left on device\n.*free"):
            write_all()
        with pytest.raises(RunError, match="No space left"):
            out.finish(durable=False)
    assert count[0] < 12  # the others gave up


def test_threads_give_up_on_what_is_already_theirs(tmp_path, monkeypatch):
    tried = []

    def pwrite(descriptor, data, position):
        tried.append(position)
        if len(tried) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        time.sleep(0.02)
        return len(data)

    monkeypatch.setattr(writer_module, "BATCH_BYTES", 100_000)
    plans = [TensorPlan(f"t{i}", "U8", (1000,)) for i in range(200)]
    with ShardWriter(tmp_path, lay_out(plans, 10**6), threads=2, max_queued_bytes=10**6) as out:
        monkeypatch.setattr(os, "pwrite", pwrite)

        def write_all():
            for plan in plans:
                out.write(plan.name, torch.zeros(1000, dtype=torch.uint8))
            out.finish(durable=False)

        with pytest.raises(RunError, match="Input/output error"):
            write_all()
    assert len(tried) < 20  # of the hundred that the other thread had


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/model\.safetensors: cannot write the header: Not a directory"):
        ShardWriter(tmp_path / "file", lay_out([TensorPlan("t", "U8", (1,))], 100))


def test_a_source_that_is_too_short_or_gone(tmp_path):
    (tmp_path / "short").write_bytes(bytes(10))
    plans = lay_out([TensorPlan("t", "U8", (100,))], 10**6)
    messages = {"short": "short: ends at byte 10, a tensor needs 95 bytes more", "gone": "gone: cannot be read"}
    for path, message in messages.items():
        with ShardWriter(tmp_path, plans) as out:
            out.copy("t", tmp_path / path, 5)
            with pytest.raises(RunError, match=message):
                out.finish(durable=False)


def test_writing_blocks_while_too_much_waits(tmp_path, monkeypatch):
    gate, real = threading.Event(), os.pwrite
    plans = [TensorPlan(f"t{i}", "U8", (1000,)) for i in range(10)]
    shards = lay_out(plans, 10**6)
    with ShardWriter(tmp_path, shards, threads=2, max_queued_bytes=3000) as out:
        monkeypatch.setattr(os, "pwrite", lambda *args: (gate.wait(10), real(*args))[1])
        done = []

        def feed():
            for plan in plans:
                out.write(plan.name, torch.ones(1000, dtype=torch.uint8))
                done.append(plan.name)

        feeder = threading.Thread(target=feed)
        feeder.start()
        time.sleep(0.3)
        assert len(done) == 3
        gate.set()
        feeder.join(10)
        assert len(out.finish(durable=False)) == 10


def test_abort_is_quick_and_leaves_no_open_file(tmp_path, monkeypatch):
    real = os.pwrite
    plans = [TensorPlan(f"t{i}", "U8", (1000,)) for i in range(1000)]
    with ShardWriter(tmp_path, lay_out(plans, 20_000), threads=2, max_queued_bytes=10**6) as out:
        monkeypatch.setattr(os, "pwrite", lambda *args: (time.sleep(0.05), real(*args))[1])
        for plan in plans:
            out.write(plan.name, torch.ones(1000, dtype=torch.uint8))
        start = time.perf_counter()
        out.abort()
        assert time.perf_counter() - start < 2
        with pytest.raises(RunError, match="closed"):
            out.finish(durable=False)
    assert open_files(tmp_path) == []


def test_finished_shards_are_closed_before_the_end(tmp_path):
    plans = [TensorPlan(f"t{i}", "U8", (1000,)) for i in range(60)]
    shards = lay_out(plans, 1500)
    assert len(shards) == 60
    with ShardWriter(tmp_path, shards, threads=1, max_queued_bytes=1000) as out:
        for plan in plans[:-1]:
            out.write(plan.name, torch.ones(1000, dtype=torch.uint8))
        assert len(open_files(tmp_path)) <= 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "PINNED_BYTES", 1000)
    torch.manual_seed(0)
    sizes = [random.Random(i).randrange(90_000) for i in range(40)]
    tensors = {f"t{i}": torch.randint(0, 255, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3), "transposed": torch.randn(300, 70).T}
    shards = lay_out([plan_of(n, t) for n, t in tensors.items()], 200_000)
    with ShardWriter(tmp_path, shards, threads=3, max_queued_bytes=120_000) as out:
        for name, tensor in tensors.items():
            # A kernel that is still running when write is called, and memory that is reused right after.
            slow = torch.randn(2000, 2000, device="cuda")
            for _ in range(5):
                slow = (slow @ slow) * 1e-3
            moved = (tensor.cuda() + (slow.sum() * 0).nan_to_num().to(tensor.dtype)).to(tensor.dtype)
            out.write(name, moved)
            del moved
            torch.full((100_000,), 7, dtype=torch.uint8, device="cuda")
        checksums = out.finish(durable=False)
    seen = read_all(tmp_path, shards)
    for name, tensor in tensors.items():
        assert raw(seen[name]) == raw(tensor), name
        assert checksums[name] == zlib.crc32(raw(tensor))
