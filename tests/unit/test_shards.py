"""The layout of a checkpoint against the safetensors library and against the format's rules."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hf_ptq.checkpoint.shards import DTYPE_BITS, ShardPlan, TensorPlan, index_json, lay_out

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}


def write_plainly(folder, shards: tuple[ShardPlan, ...], tensors: dict[str, torch.Tensor]) -> None:
    """What the plan says, written with nothing but seek and write."""
    for shard in shards:
        with (folder / shard.file).open("wb") as f:
            f.write(shard.header)
            for plan in shard.tensors:
                assert f.tell() == shard.offsets[plan.name]
                f.write(tensors[plan.name].reshape(-1).view(torch.uint8).numpy().tobytes())
        assert (folder / shard.file).stat().st_size == shard.num_bytes


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    found = {}
    for i in range(60):
        shape = rng.choice([(), (1,), (0,), (3,), (5, 7), (2, 3, 5), (0, 4), (16, 33)])
        dtype = rng.choice(list(DTYPES.values()))
        name = f"model.layers.{i}." + rng.choice(["q", 'Ö"\\', "weight", "名"])
        found[name] = torch.randint(0, 100, shape).to(dtype)
    return found


def plans_of(tensors: dict[str, torch.Tensor]) -> list[TensorPlan]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    return [TensorPlan(name, names[t.dtype], tuple(t.shape)) for name, t in tensors.items()]


@pytest.mark.parametrize("max_bytes", [600, 1000, 4000, 10**9])
def test_safetensors_reads_back_every_value(tmp_path, max_bytes):
    tensors = random_tensors(max_bytes)
    shards = lay_out(plans_of(tensors), max_bytes)
    write_plainly(tmp_path, shards, tensors)
    seen = {}
    for shard in shards:
        with safe_open(tmp_path / shard.file, framework="pt") as f:
            assert f.metadata() == {"format": "pt"}
            assert set(f.keys()) == {t.name for t in shard.tensors}
            seen |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  (safe_open is no dict)
    assert set(seen) == set(tensors)
    for name, tensor in tensors.items():
        assert seen[name].dtype == tensor.dtype
        assert torch.equal(seen[name].float(), tensor.float()), name


@pytest.mark.parametrize("max_bytes", [300, 600, 1000, 1001, 4000, 65_537])
def test_files_fill_up_and_stay_within_the_limit(max_bytes):
    plans = plans_of(random_tensors(7))
    shards = lay_out(plans, max_bytes)
    for shard in shards:
        assert shard.num_bytes <= max_bytes or len(shard.tensors) == 1, shard.file
    order = [t.name for t in plans]
    where = [next(i for i, s in enumerate(shards) if name in s.offsets) for name in order]
    assert where == sorted(where)  # greedy in the order given
    for number in range(len(shards) - 1):  # and no file was closed while its next tensor would still have fitted
        following = plans[sum(len(s.tensors) for s in shards[: number + 1])]
        (together,) = lay_out([*shards[number].tensors, following], 10**9)
        assert together.num_bytes > max_bytes - 40  # 40: the sizes of offsets are taken at their upper bound


def test_a_tensor_larger_than_the_limit_gets_its_own_file():
    plans = [TensorPlan("a", "U8", (10,)), TensorPlan("big", "U8", (5000,)), TensorPlan("b", "U8", (10,))]
    shards = lay_out(plans, 1000)
    assert [[t.name for t in s.tensors] for s in shards] == [["a"], ["big"], ["b"]]


def test_names_of_files():
    plans = [TensorPlan(f"t{i}", "U8", (100,)) for i in range(12)]
    assert [s.file for s in lay_out(plans, 10**6)] == ["model.safetensors"]
    files = [s.file for s in lay_out(plans, 400)]
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    assert lay_out([], 400) == ()


def test_data_starts_at_a_multiple_of_eight_and_every_tensor_is_aligned():
    for seed in range(20):
        for shard in lay_out(plans_of(random_tensors(seed)), 2000):
            assert len(shard.header) % 8 == 0
            assert int.from_bytes(shard.header[:8], "little") == len(shard.header) - 8
            for plan in shard.tensors:
                assert shard.offsets[plan.name] % (DTYPE_BITS[plan.dtype] // 8) == 0, plan


def test_tensors_lie_without_gaps():
    (shard,) = lay_out(plans_of(random_tensors(3)), 10**9)
    position = len(shard.header)
    for plan in shard.tensors:
        assert shard.offsets[plan.name] == position
        position += plan.num_bytes
    assert position == shard.num_bytes


def test_header_equals_the_one_of_the_library_for_the_same_order(tmp_path):
    tensors = {'b"ü': torch.arange(6, dtype=torch.float32), "c": torch.tensor(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "x.safetensors").read_bytes()
    (shard,) = lay_out(plans_of(tensors), 10**9)
    assert data[: len(shard.header)] == shard.header


def test_index_counts_the_bytes_of_tensors_only():
    plans = [TensorPlan("b", "F32", (100,)), TensorPlan("a", "BF16", (3, 5)), TensorPlan("s", "F32", ())]
    shards = lay_out(plans, 300)
    index = index_json(shards)
    assert index["metadata"] == {"total_size": 400 + 30 + 4}
    assert list(index["weight_map"]) == ["a", "b", "s"]
    assert index["weight_map"]["b"] == "model-00001-of-00002.safetensors"
    assert index["weight_map"]["a"] == index["weight_map"]["s"] == "model-00002-of-00002.safetensors"
    json.dumps(index)


def test_sizes_of_elements_below_a_byte():
    assert TensorPlan("x", "F4", (4, 6)).num_bytes == 12
    with pytest.raises(ValueError, match=r"x: .*whole bytes"):
        _ = TensorPlan("x", "F4", (3,)).num_bytes
    with pytest.raises(ValueError, match=r"x: Q3 is no safetensors dtype"):
        _ = TensorPlan("x", "Q3", (3,)).num_bytes


def test_a_name_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"given twice: \['a'\]"):
        lay_out([TensorPlan("a", "U8", (1,)), TensorPlan("a", "U8", (1,))], 100)
