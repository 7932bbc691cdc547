"""The plan: how the model is laid over the ranks and devices, decided once, in pure code, before weights exist.

Facts in, a plan with its reasons and memory arithmetic out, or a refusal that names what cures it. In bytes per rank,
with W ranks, an expert-parallel degree d, dense weights D, experts E, and units (decoder layers) as temporaries:

    single, replicated                D + E + one unit
    expert-parallel, dense replicated D + E / d + one unit of those
    expert-parallel, dense sharded    (D + E) / W + two dense units, and with W > d one unit's E / d, gathered
    fsdp2                             (D + E) / W + two units, gathered
    device map                        what the map puts on a device + one unit, if any is brought there to compute

Order of trying: one process holds the model whole, else by a device map. A mixture of experts over several ranks is
expert-parallel with a replicated dense part, then with a sharded one; a dense model is replicated. The degree is the
largest divisor of W that divides the number of experts; ranks beyond it form several expert-parallel groups.

This file knows no tensors and no process group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from hf_ptq.distributed.launch import Wishes
from hf_ptq.errors import Problem, UserError
from hf_ptq.sizes import gigabytes

MANY_WORLDS = 8  # named in a message
CPU, DISK = "cpu", "disk"  # as a device map names them
SIZES = ("--gpu_max_mem_percentage", "--max_gpu_memory_gb", "--max_cpu_memory_gb")

Kind = Literal["single", "replicated", "expert-parallel", "fsdp2", "device map"]
Dense = Literal["replicated", "fsdp"]


@dataclass(frozen=True)
class Spread:
    """A way to spread the model over the devices of one process: "cuda:N", "cpu" and "disk", the fastest first.

    `device_map`: module -> device; `num_bytes`: device -> weights on it; `rooms`: device -> what weights may take of
    it (no "cpu" where a GPU computes and nothing may be kept in host memory, no "disk" without a folder).
    `asked`: the options that ask for it.
    """

    device_map: Mapping[str, str]
    num_bytes: Mapping[str, int]
    rooms: Mapping[str, int]
    offload_folder: Path | None = None
    asked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What the plan depends on. Bytes are of the loaded model; `free_bytes` is what the poorest rank may take.

    `num_experts`: of a layer (the greatest common divisor, where layers differ); 0 for a dense model.
    `expert_parallel_problem`, `fsdp_problem`: why the model cannot be laid out so; empty if it can.
    """

    dense_bytes: int
    expert_bytes: int
    dense_unit_bytes: int  # of the largest unit
    expert_unit_bytes: int
    device: str
    free_bytes: int
    world_size: int = 1
    num_experts: int = 0
    expert_parallel_problem: str = ""
    fsdp_problem: str = ""
    spread: Spread | None = None  # where one process is to be spread, or does not fit on its device

    @property
    def unit_bytes(self) -> int:
        """At least those of the largest unit."""
        return self.dense_unit_bytes + self.expert_unit_bytes

    @property
    def fits_whole(self) -> bool:
        """Whether every rank has room for the whole model."""
        return _replicated(self, "single", "").expected_bytes <= self.free_bytes

    @property
    def model_bytes(self) -> int:
        """All weights."""
        return self.dense_bytes + self.expert_bytes


@dataclass(frozen=True)
class Plan:
    """The layout of the model, and why.

    `device_map`: as in `Spread`; empty in other plans. `offload_folder` is given where something goes there.
    """

    kind: Kind
    device: str
    expected_bytes: int  # of each rank: weights, and what is gathered or temporary
    reasons: tuple[str, ...]
    world_size: int = 1
    ep_degree: int = 1
    dense: Dense = "replicated"
    warnings: tuple[str, ...] = ()
    device_map: Mapping[str, str] = field(default_factory=dict)
    offload_folder: Path | None = None
    fetched_bytes: int = 0  # of the largest unit, where units are brought to `device` to compute

    @property
    def shards_model(self) -> bool:
        """Whether a forward needs all ranks: they then run it in lockstep."""
        return self.ep_degree > 1 or self.dense == "fsdp"

    def run_experts(self, num_experts: int, rank: int) -> range:
        """The experts of a layer that a forward runs on `rank`."""
        each = num_experts // self.ep_degree
        start = rank % self.ep_degree * each
        return range(start, start + each)

    def written_experts(self, num_experts: int, rank: int) -> range:
        """The experts of a layer that `rank` writes: of those that it runs, its share among the groups."""
        run = self.run_experts(num_experts, rank)
        part = _chunk(len(run), self.world_size // self.ep_degree, rank // self.ep_degree)
        return range(run.start + part.start, run.start + part.stop)

    def held_experts(self, num_experts: int, rank: int) -> range:
        """The experts of a layer that `rank` holds: where the model is sharded, the groups share them out."""
        return (self.written_experts if self.dense == "fsdp" else self.run_experts)(num_experts, rank)

    def held_rows(self, num_rows: int, rank: int) -> range:
        """The rows of a dense weight that `rank` holds."""
        return _chunk(num_rows, self.world_size, rank) if self.dense == "fsdp" else range(num_rows)


def _chunk(length: int, parts: int, index: int) -> range:
    """Part `index` of [0, length) as `torch.chunk` and DTensor's Shard cut it: full parts first, then none."""
    size = -(-length // parts)
    return range(min(length, index * size), min(length, (index + 1) * size))


def free_bytes(device: torch.device) -> int:
    """Memory that this process may still take on a device: of the GPU, or of the host as Linux estimates it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def decide_plan(facts: Facts, wishes: Wishes = Wishes()) -> Plan:  # noqa: B008 - frozen
    """Raises UserError where no placement fits, or where what is wished for cannot be had."""
    if wishes.use_fsdp2:
        return _fsdp2(facts)
    if facts.world_size == 1:
        return _one_process(facts)
    warning = ""
    if facts.num_experts > 1 and wishes.ep_degree != 1:
        degree, warning = _degree(facts, wishes)
        if degree > 1:
            return _expert_parallel(facts, degree, wishes)
    elif wishes.ep_degree is not None and wishes.ep_degree > 1:
        what = f"an expert-parallel degree of {wishes.ep_degree} was asked for, but the model has no routed experts"
        raise UserError(Problem(what, "leave it out; --use_fsdp2 shards a dense model"))
    if wishes.dense == "fsdp":
        what = "--dense fsdp is for what is not an expert in an expert-parallel run"
        raise UserError(Problem(what, "--use_fsdp2 shards the whole model"))
    if warning:
        why = f"without expert parallelism: {warning}"
        return _fitting([_replicated(facts, "replicated", why, (warning,))], facts)
    why = "--ep_degree 1: every rank holds all experts" if facts.num_experts else "a dense model: every rank holds it"
    return _fitting([_replicated(facts, "replicated", why)], facts)


def _one_process(facts: Facts) -> Plan:
    """Whole on one device; by a device map if that is asked for, or if the model does not fit otherwise."""
    spread = facts.spread
    whole = _replicated(facts, "single", "one process: the whole model on one device")
    if spread is None or (facts.fits_whole and not spread.asked):
        return _fitting([whole], facts)
    problems = list(_spread_problems(facts, spread))
    if problems and not spread.asked:
        problems.insert(0, Problem(f"the model does not fit: single: {whole.reasons[-1]}"))
    if problems:
        raise UserError(*problems)
    why = f"asked for by {', '.join(spread.asked)}" if spread.asked else "the model does not fit on one device"
    fetched = facts.unit_bytes if _is_offloaded(facts, spread) else 0
    arithmetic = _spread_arithmetic(spread)
    if fetched:
        arithmetic += f"; one unit {gigabytes(fetched)} at a time is brought to {facts.device} to compute"
    return Plan(
        "device map",
        facts.device,
        spread.num_bytes.get(facts.device, 0) + fetched,
        (why, arithmetic),
        device_map=spread.device_map,
        offload_folder=spread.offload_folder if spread.num_bytes.get(DISK) else None,
        fetched_bytes=fetched,
    )


def _is_offloaded(facts: Facts, spread: Spread) -> bool:
    """Whether weights live where nothing is computed."""
    return any(device in (CPU, DISK) and device != facts.device for device, size in spread.num_bytes.items() if size)


def _spread_arithmetic(spread: Spread) -> str:
    parts = [
        f"{device} {gigabytes(spread.num_bytes.get(device, 0))} of {gigabytes(room)}"
        for device, room in spread.rooms.items()
        if device != DISK or spread.num_bytes.get(DISK)
    ]
    return f"weights on {', '.join(parts)}"


def _spread_problems(facts: Facts, spread: Spread) -> Iterator[Problem]:
    """Why a device map cannot be used."""
    on_disk, room = spread.num_bytes.get(DISK, 0), spread.rooms.get(DISK)
    if on_disk and room is None:
        cures = [f"a larger {option}" for option in spread.asked if option in SIZES]
        if CPU not in spread.rooms:
            cures.append("--max_cpu_memory_gb N keeps so much in host memory")
        cures.append("--offload_folder DIRECTORY keeps the rest on a disk")
        what = f"the model does not fit: device map: {_spread_arithmetic(spread)}; {gigabytes(on_disk)} have no place"
        yield Problem(what, "; ".join(cures))
    elif room is not None and on_disk > room:
        folder = f"--offload_folder {spread.offload_folder}"
        what = f"{folder} would hold {gigabytes(on_disk)}, its file system has {gigabytes(room)} free"
        yield Problem(what, "take another folder, or keep more in memory (--max_cpu_memory_gb)")
    room = spread.rooms[facts.device]
    if _is_offloaded(facts, spread) and room < facts.unit_bytes:
        larger = [f"a larger {option}" for option in spread.asked if option in SIZES]
        needed = f"the largest unit alone needs {gigabytes(facts.unit_bytes)}"
        what = f"weights may take {gigabytes(room)} of {facts.device}, {needed}"
        yield Problem(what, "; ".join([*larger, "use a device with more memory"]))


def _degree(facts: Facts, wishes: Wishes) -> tuple[int, str]:
    """The expert-parallel degree, or 1 and why. UserError where the one that is asked for cannot be had."""
    asked, experts, world = wishes.ep_degree, facts.num_experts, facts.world_size
    if facts.expert_parallel_problem:
        if asked is not None:
            what = f"an expert-parallel degree of {asked} was asked for: {facts.expert_parallel_problem}"
            raise UserError(Problem(what, "--ep_degree 1 replicates the experts, --use_fsdp2 shards them"))
        return 1, facts.expert_parallel_problem
    if asked is None:
        degree = math.gcd(world, experts)
        if degree == 1:
            worlds = [n for n in range(2, experts + 1) if experts % n == 0][:MANY_WORLDS]
            what = f"{world} ranks cannot share {experts} experts evenly"
            cure = f"use {', '.join(map(str, worlds))} ranks (or a multiple), or --ep_degree 1 to replicate the experts"
            raise UserError(Problem(what, cure))
        return degree, ""
    if world % asked or experts % asked:
        number, of = (world, "ranks") if world % asked else (experts, "experts")
        degrees = [n for n in range(1, world + 1) if world % n == 0 and experts % n == 0]
        what = f"an expert-parallel degree of {asked} does not divide {number} {of}"
        raise UserError(Problem(what, f"--ep_degree {' or '.join(map(str, degrees))}"))
    return asked, ""


def _replicated(facts: Facts, kind: Kind, why: str, warnings: tuple[str, ...] = ()) -> Plan:
    unit = facts.unit_bytes
    needed = facts.model_bytes + unit
    arithmetic = f"weights {gigabytes(facts.model_bytes)} + one unit {gigabytes(unit)}; {_free(facts)}"
    return Plan(kind, facts.device, needed, (why, arithmetic), facts.world_size, warnings=warnings)


def _expert_parallel(facts: Facts, degree: int, wishes: Wishes) -> Plan:
    groups = facts.world_size // degree
    held = facts.num_experts // degree
    why = f"{facts.num_experts} experts over {degree} ranks: {held} each"
    if groups > 1:
        why += f", in {groups} expert-parallel groups"
    own, unit = facts.expert_bytes // degree, facts.dense_unit_bytes + facts.expert_unit_bytes // degree
    needed = facts.dense_bytes + own + unit
    weights = f"dense weights {gigabytes(facts.dense_bytes)} + experts {gigabytes(own)}"
    arithmetic = f"{weights} + one unit {gigabytes(unit)}; {_free(facts)}"
    reasons = (why, "the dense part replicated: no forward gathers it", arithmetic)
    replicated = Plan("expert-parallel", facts.device, needed, reasons, facts.world_size, degree)
    gathered = 2 * facts.dense_unit_bytes + (facts.expert_unit_bytes // degree if groups > 1 else 0)
    share = facts.model_bytes // facts.world_size
    arithmetic = f"weights {gigabytes(share)} + two units, gathered, {gigabytes(gathered)}; {_free(facts)}"
    asked = wishes.dense == "fsdp"
    reason = "the dense part sharded by FSDP2: " + ("asked for" if asked else "it does not fit whole")
    reasons = (why, reason, arithmetic)
    sharded = Plan("expert-parallel", facts.device, share + gathered, reasons, facts.world_size, degree, "fsdp")
    if asked and facts.fsdp_problem:
        raise UserError(Problem(f"--dense fsdp: {facts.fsdp_problem}", "leave it out"))
    if wishes.dense is not None:
        return _fitting([sharded if asked else replicated], facts)
    return _fitting([replicated] + ([] if facts.fsdp_problem else [sharded]), facts)


def _fsdp2(facts: Facts) -> Plan:
    if facts.fsdp_problem:
        raise UserError(Problem(f"--use_fsdp2: {facts.fsdp_problem}", "leave it out"))
    share = facts.model_bytes // facts.world_size
    gathered = 2 * (facts.dense_unit_bytes + facts.expert_unit_bytes)
    arithmetic = f"weights {gigabytes(share)} + two units, gathered, {gigabytes(gathered)}; {_free(facts)}"
    why = f"--use_fsdp2: every weight sharded over {facts.world_size} ranks"
    plan = Plan("fsdp2", facts.device, share + gathered, (why, arithmetic), facts.world_size, dense="fsdp")
    return _fitting([plan], facts)


def _fitting(plans: list[Plan], facts: Facts) -> Plan:
    """The first plan that fits; UserError with the arithmetic of each if none does."""
    for plan in plans:
        if plan.expected_bytes <= facts.free_bytes:
            return plan
    cures = []
    if facts.world_size > 1:
        if plans[-1].kind == "replicated":
            cures.append("--use_fsdp2 shards it over the ranks" if not facts.fsdp_problem else "")
        elif plans[-1].dense == "replicated":
            cures.append("--dense fsdp shards the rest" if not facts.fsdp_problem else "")
        cures.append("use more ranks")
    cures.append("use a device with more memory" + (", or --device cpu" if facts.device.startswith("cuda") else ""))
    problems = [f"the model does not fit: {plan.kind}: {plan.reasons[-1]}" for plan in plans]
    cure = "; ".join(filter(None, cures))
    raise UserError(*(Problem(what, cure if i == len(problems) else "") for i, what in enumerate(problems, 1)))


def _free(facts: Facts) -> str:
    return f"{gigabytes(facts.free_bytes)} free on {facts.device}" + (" for each rank" if facts.world_size > 1 else "")
