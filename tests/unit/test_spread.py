"""Device maps for invented GPUs, and the plan that they make."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tiny import save_tiny

from hf_ptq.checkpoint.source import open_source
from hf_ptq.config import RunConfig
from hf_ptq.distributed.plan import Facts, Spread, decide_plan
from hf_ptq.errors import UserError
from hf_ptq.model import device_map
from hf_ptq.model.build import MetaModel, build_meta_model
from hf_ptq.model.device_map import limit_rooms, spread_model
from hf_ptq.report import Report

GB = 10**9
MANY = 10**9  # more than a tiny model needs


def meta_of(directory: Path) -> MetaModel:
    return build_meta_model(open_source(str(directory), None, False, Report(Console(quiet=True), verbose=False)))


def bytes_of(directory: Path) -> int:
    """Of the model in memory; a router that is stored in bf16 may be in fp32."""
    stored = load_file(directory / "model.safetensors")
    known = meta_of(directory).model.state_dict()
    return sum(max(tensor.nbytes, known[n].nbytes if n in known else 0) for n, tensor in stored.items())


def spread(meta: MetaModel, rooms: dict[str, int], *, sequential: bool = False) -> Spread:
    return spread_model(meta.model, rooms, sequential=sequential, asked=(), folder=None)


def homes(meta: MetaModel, found: Spread) -> dict[str, str]:
    """Parameter -> device."""
    return {name: device_map._home(found.device_map, name) for name in meta.model.state_dict()}


def gpus(number: int, room: int) -> dict[str, int]:
    return {f"cuda:{index}": room for index in range(number)}


# --- the map -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("parts", [2.5, 6])
def test_layers_stay_whole_and_every_weight_has_a_place(
    name: str, sequential: bool, parts: float, tiny: Callable[[str], Path]
) -> None:
    meta, total = meta_of(tiny(name)), bytes_of(tiny(name))
    found = spread(meta, gpus(2, int(total / parts)) | {"cpu": total // 3}, sequential=sequential)
    places = homes(meta, found)
    for layer in ("model.layers.0.", "model.layers.1.", "model.layers.2."):
        assert len({device for parameter, device in places.items() if parameter.startswith(layer)}) == 1
    assert sum(found.num_bytes.values()) == total
    assert all(found.num_bytes.get(device, 0) <= room for device, room in found.rooms.items())
    assert places["model.embed_tokens.weight"] == places["lm_head.weight"] or name != "llama_tied"


def test_gpus_are_filled_evenly_or_one_after_the_other(tmp_path: Path) -> None:
    directory = save_tiny("llama", tmp_path, num_hidden_layers=8)
    meta, total = meta_of(directory), bytes_of(directory)
    rooms = gpus(2, int(total * 0.9))
    evenly, in_turn = spread(meta, rooms).num_bytes, spread(meta, rooms, sequential=True).num_bytes
    assert in_turn["cuda:0"] > 2 * in_turn["cuda:1"]
    assert evenly["cuda:0"] < in_turn["cuda:0"]
    assert 0.5 < evenly["cuda:0"] / evenly["cuda:1"] < 2
    assert set(spread(meta, gpus(2, 3 * total), sequential=True).num_bytes) == {"cuda:0"}


def test_what_the_gpus_have_no_room_for_goes_to_the_host_and_then_to_the_disk(tiny: Callable[[str], Path]) -> None:
    meta, total = meta_of(tiny("llama")), bytes_of(tiny("llama"))
    assert set(spread(meta, {"cuda:0": total // 2}).num_bytes) == {"cuda:0", "disk"}
    assert set(spread(meta, {"cuda:0": total // 2, "cpu": MANY}).num_bytes) == {"cuda:0", "cpu"}
    three = spread(meta, {"cuda:0": total // 2, "cpu": total // 2})
    assert set(three.num_bytes) == {"cuda:0", "cpu", "disk"}
    assert homes(meta, three)["model.embed_tokens.weight"] == "cuda:0"
    assert homes(meta, three)["lm_head.weight"] == "disk"
    assert set(spread(meta, {"cpu": MANY}).num_bytes) == {"cpu"}


def test_one_gpu_that_is_not_the_first(tiny: Callable[[str], Path]) -> None:
    found = spread(meta_of(tiny("llama")), {"cuda:3": MANY})
    assert set(found.device_map.values()) == {"cuda:3"}


def test_even_filling_leaves_nothing_over_that_filling_in_turn_has_room_for(tmp_path: Path) -> None:
    """The first layers of this family are smaller than the others: an even share is reckoned too small."""
    directory = save_tiny("deepseek_v3", tmp_path, num_hidden_layers=6)
    meta, total = meta_of(directory), bytes_of(directory)
    rooms = gpus(2, int(total * 0.645))
    assert "disk" not in spread(meta, rooms, sequential=True).num_bytes
    assert "disk" not in spread(meta, rooms).num_bytes


def test_the_meta_model_is_left_as_it_was(tiny: Callable[[str], Path]) -> None:
    meta = meta_of(tiny("llama_tied"))
    before = {name: id(parameter) for name, parameter in meta.model.named_parameters(remove_duplicate=False)}
    found = spread(meta, {"cpu": bytes_of(tiny("llama_tied")) // 2})
    assert {n: id(p) for n, p in meta.model.named_parameters(remove_duplicate=False)} == before
    assert sum(found.num_bytes.values()) == bytes_of(tiny("llama_tied")), "a tied weight is counted once"


# --- rooms -------------------------------------------------------------------------------------

FREE = {"cuda:0": 100 * GB, "cuda:1": 50 * GB, "cpu": 200 * GB}


@pytest.mark.parametrize(
    ("options", "rooms"),
    [
        ({}, {"cuda:0": 80 * GB, "cuda:1": 40 * GB}),
        ({"gpu_max_mem_percentage": 0.5}, {"cuda:0": 50 * GB, "cuda:1": 25 * GB}),
        ({"max_gpu_memory_gb": 60}, {"cuda:0": 60 * GB, "cuda:1": 50 * GB}),
        ({"max_gpu_memory_gb": 60, "gpu_max_mem_percentage": 0.5}, {"cuda:0": 50 * GB, "cuda:1": 25 * GB}),
        ({"max_cpu_memory_gb": 30}, {"cuda:0": 80 * GB, "cuda:1": 40 * GB, "cpu": 30 * GB}),
        ({"max_cpu_memory_gb": 300}, {"cuda:0": 80 * GB, "cuda:1": 40 * GB, "cpu": 200 * GB}),
        ({"offload_folder": Path("x")}, {"cuda:0": 80 * GB, "cuda:1": 40 * GB, "cpu": 160 * GB}),
    ],
)
def test_rooms_beside_gpus(options: dict, rooms: dict[str, int]) -> None:
    assert limit_rooms(RunConfig("m", Path("out"), **options), FREE, "cuda:0") == rooms


def test_rooms_on_a_cpu() -> None:
    free = {"cpu": 200 * GB, "disk": 7}
    assert limit_rooms(RunConfig("m", Path("out")), free, "cpu") == {"cpu": 160 * GB, "disk": 7}
    limited = RunConfig("m", Path("out"), max_cpu_memory_gb=0.5)
    assert limit_rooms(limited, free, "cpu") == {"cpu": GB // 2, "disk": 7}


def test_options_about_gpus_where_there_is_none_are_refused() -> None:
    config = RunConfig("m", Path("out"), use_seq_device_map=True, max_gpu_memory_gb=3)
    with pytest.raises(UserError, match="there is no GPU, --use_seq_device_map, --max_gpu_memory_gb can do nothing"):
        device_map.measure_rooms(config, torch.device("cpu"))


def test_the_disk_has_as_much_room_as_its_file_system(tmp_path: Path) -> None:
    config = RunConfig("m", Path("out"), device="cpu", offload_folder=tmp_path / "not" / "there")
    found = os.statvfs(tmp_path)
    assert device_map.measure_rooms(config, torch.device("cpu"))["disk"] == pytest.approx(
        found.f_bavail * found.f_frsize, rel=0.05
    )
    assert not list(tmp_path.iterdir()), "a plan makes nothing"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        device_map.measure_rooms(
            RunConfig("m", Path("out"), offload_folder=tmp_path / "file" / "inside"), torch.device("cpu")
        )


# --- the plan ----------------------------------------------------------------------------------


def facts(free: int, spread: Spread | None, device: str = "cuda:0") -> Facts:
    """Of a model of 10 GB whose largest unit has 2."""
    return Facts(8 * GB, 2 * GB, GB, GB, device, free * GB, num_experts=8, spread=spread)


def spread_of(sizes: dict[str, int], rooms: dict[str, int], **options) -> Spread:
    def in_gb(numbers: dict[str, int]) -> dict[str, int]:
        return {device: number * GB for device, number in numbers.items()}

    return Spread({"": "cuda:0"}, in_gb(sizes), in_gb(rooms), **options)


TWO_GPUS = spread_of({"cuda:0": 5, "cuda:1": 5}, {"cuda:0": 8, "cuda:1": 8})


def test_whole_before_spread() -> None:
    assert decide_plan(facts(12, TWO_GPUS)).kind == "single"
    plan = decide_plan(facts(11, TWO_GPUS))
    assert (plan.kind, plan.expected_bytes, plan.fetched_bytes, plan.offload_folder) == ("device map", 5 * GB, 0, None)
    assert plan.reasons == (
        "the model does not fit on one device",
        "weights on cuda:0 5.00 GB of 8.00 GB, cuda:1 5.00 GB of 8.00 GB",
    )
    assert plan.device_map == {"": "cuda:0"}
    assert not plan.shards_model


def test_a_map_that_is_asked_for_is_taken() -> None:
    asked = spread_of({"cuda:0": 10}, {"cuda:0": 99}, asked=("--use_seq_device_map",))
    plan = decide_plan(facts(99, asked))
    assert plan.kind == "device map"
    assert plan.reasons[0] == "asked for by --use_seq_device_map"


def test_what_is_brought_to_the_device_is_reckoned() -> None:
    folder = Path("folder")
    rooms = {"cuda:0": 8, "cpu": 3, "disk": 100}
    plan = decide_plan(facts(9, spread_of({"cuda:0": 5, "cpu": 2, "disk": 3}, rooms, offload_folder=folder)))
    assert (plan.expected_bytes, plan.fetched_bytes, plan.offload_folder) == (7 * GB, 2 * GB, folder)
    assert plan.reasons[-1].endswith(
        "cpu 2.00 GB of 3.00 GB, disk 3.00 GB of 100.00 GB; one unit 2.00 GB at a time is brought to cuda:0 to compute"
    )
    on_cpu = spread_of({"cpu": 10}, {"cpu": 20, "disk": 9}, asked=("--offload_folder",), offload_folder=folder)
    plan = decide_plan(facts(9, on_cpu, "cpu"))
    assert (plan.expected_bytes, plan.fetched_bytes, plan.offload_folder) == (10 * GB, 0, None)
    assert "disk" not in plan.reasons[-1]


@pytest.mark.parametrize(
    ("device", "sizes", "rooms", "says"),
    [
        ("cuda:0", {"cuda:0": 5, "disk": 5}, {"cuda:0": 8}, ["5.00 GB have no place", "--max_cpu_memory_gb N keeps"]),
        ("cuda:0", {"cuda:0": 5, "disk": 5}, {"cuda:0": 8, "cpu": 3}, ["no place", "--offload_folder DIRECTORY"]),
        ("cpu", {"cpu": 5, "disk": 5}, {"cpu": 6}, ["no place", "--offload_folder DIRECTORY"]),
        ("cuda:0", {"disk": 9}, {"cuda:0": 4, "disk": 8}, ["would hold 9.00 GB", "has 8.00 GB free"]),
        ("cuda:0", {"cpu": 10}, {"cuda:0": 1, "cpu": 20}, ["take 1.00 GB of cuda:0", "unit alone needs 2.00 GB"]),
        ("cpu", {"disk": 10}, {"cpu": 1, "disk": 20}, ["may take 1.00 GB of cpu", "a device with more memory"]),
    ],
)
@pytest.mark.parametrize("asked", [(), ("--max_cpu_memory_gb", "--offload_folder")])
def test_refusals_name_their_cure(
    device: str, sizes: dict[str, int], rooms: dict[str, int], says: list[str], asked: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as raised:
        decide_plan(facts(9, spread_of(sizes, rooms, asked=asked), device))
    text = str(raised.value)
    assert all(part in text for part in says), text
    assert ("a larger --max_cpu_memory_gb" in text) == (bool(asked) and "would hold" not in text)
    assert ("single: weights 10.00 GB + one unit 2.00 GB; 9.00 GB free" in text) == (not asked)


# --- the options -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"gpu_max_mem_percentage": 80.0}, "--gpu_max_mem_percentage 80 is not above 0 and at most 1"),
        ({"gpu_max_mem_percentage": 0.0}, "--gpu_max_mem_percentage 0 is not above 0 and at most 1"),
        ({"gpu_max_mem_percentage": float("nan")}, "--gpu_max_mem_percentage nan is not above 0 and at most 1"),
        ({"max_gpu_memory_gb": 0.0}, "--max_gpu_memory_gb 0 is no size"),
        ({"max_cpu_memory_gb": -1.0}, "--max_cpu_memory_gb -1 is no size"),
        ({"max_cpu_memory_gb": float("inf")}, "--max_cpu_memory_gb inf is no size"),
        (
            {"device": "cpu", "max_gpu_memory_gb": 2.0, "max_cpu_memory_gb": 2.0},
            "--device cpu uses no GPU, --max_gpu_memory_gb can do nothing",
        ),
        (
            {"use_fsdp2": True, "max_cpu_memory_gb": 2.0},
            "--use_fsdp2 shards over ranks, --max_cpu_memory_gb spread within one process",
        ),
    ],
)
def test_rules_of_the_options(changed: dict, what: str) -> None:
    assert [p.what for p in RunConfig("org/name", Path("out"), **changed).problems()] == [what]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (problem,) = RunConfig("org/name", Path("out"), offload_folder=file).problems()
    assert problem.what == f"--offload_folder {file} is a file"
    assert RunConfig("org/name", Path("out"), offload_folder=tmp_path / "new", max_cpu_memory_gb=1.5).problems() == []
