"""How this process was started: what a launcher such as torchrun says in the environment.

One process of a run is told RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK (the node) and where to meet
the others. Where nothing of that is set, the run is one process. What can be refused from these numbers and the
options alone is refused here, before torch is imported. Options of the layout may also come as variables:

    HF_PTQ_EP_DEGREE, HF_PTQ_DENSE             as --ep_degree and --dense
    MODELOPT_EP_DEGREE, MODELOPT_FSDP_SIZE     the same under the peer's names (1: replicated; the world size: fsdp)

This file knows neither torch nor the model.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hf_ptq.config import DENSE_CHOICES, RunConfig
from hf_ptq.errors import Problem

EP_VARIABLE, EP_ALIAS = "HF_PTQ_EP_DEGREE", "MODELOPT_EP_DEGREE"
DENSE_VARIABLE, DENSE_ALIAS = "HF_PTQ_DENSE", "MODELOPT_FSDP_SIZE"


@dataclass(frozen=True)
class Launch:
    """The place of this process among those of the run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    num_nodes: int = 1

    @property
    def name(self) -> str:
        """For messages: rank 1 (node 0, HOST)."""
        return f"rank {self.rank} (node {self.node}, {socket.gethostname()})"


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """The launch that the environment tells of; one process where it tells of none, or of one that makes no sense."""
    if launch_problems(environ):
        return Launch()

    def number(name: str, default: int) -> int:
        return int(environ.get(name) or default)

    rank, world_size = number("RANK", 0), number("WORLD_SIZE", 1)
    local_world_size = number("LOCAL_WORLD_SIZE", world_size)
    return Launch(
        rank,
        world_size,
        number("LOCAL_RANK", rank % local_world_size),
        local_world_size,
        number("GROUP_RANK", rank // local_world_size),
        number("GROUP_WORLD_SIZE", -(-world_size // local_world_size)),
    )


def launch_problems(environ: Mapping[str, str] = os.environ) -> list[Problem]:
    """What is wrong with the variables of the launcher."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    odd = [f"{name}={environ[name]!r}" for name in names if environ.get(name) and not _counts(name, environ[name])]
    if odd:
        what = f"no numbers of ranks: {', '.join(odd)}"
        return [Problem(what, "start the ranks with torchrun, which sets these variables")]
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environ.get(name)]
    if int(environ.get("WORLD_SIZE") or 1) > 1 and missing:
        what = f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {', '.join(missing)} is not set"
        return [Problem(what, "start the ranks with torchrun, or unset WORLD_SIZE for a run of one process")]
    if int(environ.get("RANK") or 0) >= int(environ.get("WORLD_SIZE") or 1):
        what = f"RANK is {environ['RANK']}, but WORLD_SIZE is {environ.get('WORLD_SIZE') or 'not set'}"
        return [Problem(what, "start the ranks with torchrun, or unset RANK for a run of one process")]
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or "1"
    if tasks != "1" and not environ.get("RANK"):
        what = f"srun started {tasks} tasks, each of which would quantize the whole model by itself"
        return [Problem(what, "let srun start one torchrun on each node, as slurm/*.slurm do; or srun --ntasks 1")]
    return []


def _counts(name: str, value: str) -> bool:
    """Whether a variable holds a whole number; there is a rank 0, but nothing has the size 0."""
    return value.isdecimal() and (int(value) > 0 or not name.endswith("SIZE"))


# --- the options -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wishes:
    """What the options and the environment ask of the layout; None leaves it to the plan."""

    ep_degree: int | None = None
    dense: str | None = None
    use_fsdp2: bool = False
    notes: tuple[str, ...] = ()  # where a wish came from, if not from an option


def read_wishes(config: RunConfig, launch: Launch, environ: Mapping[str, str] = os.environ) -> Wishes:
    """Options before variables; variables that make no sense are left out (`option_problems` tells of them)."""
    found = {name: value for name, value, _ in _variables(launch, environ)}
    degree, dense = found.get(EP_VARIABLE) or found.get(EP_ALIAS), found.get(DENSE_VARIABLE) or found.get(DENSE_ALIAS)
    notes = [
        f"{name}={environ[name]} from the environment" + (f" (the same as {own})" if own else "")
        for name, _, own in _variables(launch, environ)
    ]
    wanted = config.ep_degree if config.ep_degree is not None else int(degree) if degree else None
    return Wishes(wanted, config.dense or dense, config.use_fsdp2, tuple(notes))


def _variables(launch: Launch, environ: Mapping[str, str]) -> Iterator[tuple[str, str, str | None]]:
    """(variable, value as the option takes it, the variable it is another name for)."""
    for name, own in ((EP_VARIABLE, None), (EP_ALIAS, EP_VARIABLE)):
        value = environ.get(name, "")
        if value.isdigit() and int(value):
            yield name, value, own
    if environ.get(DENSE_VARIABLE) in DENSE_CHOICES:
        yield DENSE_VARIABLE, environ[DENSE_VARIABLE], None
    meaning = {"1": "replicated", str(launch.world_size): "fsdp"} if launch.world_size > 1 else {"1": "replicated"}
    if (size := environ.get(DENSE_ALIAS, "")) in meaning:
        yield DENSE_ALIAS, meaning[size], DENSE_VARIABLE


def option_problems(config: RunConfig, launch: Launch, environ: Mapping[str, str] = os.environ) -> Iterator[Problem]:
    """What in the options and variables does not go together, or not with this number of ranks."""
    yield from _variable_problems(config, launch, environ)
    wishes = read_wishes(config, launch, environ)
    world, degree = launch.world_size, wishes.ep_degree
    is_variables = world == 1 and config.ep_degree is None  # of which that is said already
    if degree is not None and degree > 0 and world % degree and not is_variables:
        what = f"an expert-parallel degree of {degree} does not divide the {world} ranks of this run"
        yield Problem(what, f"--ep_degree {', or '.join(map(str, _divisors(world)))}")
    if wishes.use_fsdp2 and degree is not None and degree > 1:
        what = f"--use_fsdp2 shards the experts too, an expert-parallel degree of {degree} asks for something else"
        yield Problem(what, "leave out --use_fsdp2, and say --dense fsdp to shard what is not an expert")
    if wishes.use_fsdp2 and wishes.dense == "replicated":
        yield Problem("--use_fsdp2 shards the dense part, --dense replicated does not", "leave one of them out")
    if world == 1:
        if wishes.dense == "fsdp" and not wishes.use_fsdp2:
            yield Problem("the dense part cannot be sharded over one process", f"leave out {_source_of(config)}")
        return
    if config.device.startswith("cuda:"):
        what = f"--device {config.device} would put all {world} ranks on one GPU"
        yield Problem(what, "--device cuda: each rank takes the GPU of its own number")
    yield from _single_process_options(config, world)


def _source_of(config: RunConfig) -> str:
    return "--dense fsdp" if config.dense else f"{DENSE_VARIABLE} and {DENSE_ALIAS}"


def _single_process_options(config: RunConfig, world: int) -> Iterator[Problem]:
    cure = "run one process, or leave it out: over several ranks a model is laid out with --dense and --use_fsdp2"
    for flag in config.device_map_options():
        yield Problem(f"{flag} spreads the model of one process; this run has {world} ranks", cure)


def _variable_problems(config: RunConfig, launch: Launch, environ: Mapping[str, str]) -> Iterator[Problem]:
    understood = {name: value for name, value, _ in _variables(launch, environ)}
    for name in (EP_VARIABLE, EP_ALIAS, DENSE_VARIABLE, DENSE_ALIAS):
        if environ.get(name) and name not in understood:
            yield Problem(f"{name}={environ[name]!r} cannot be used", _meaning(name, launch.world_size))
    groups = (
        ("--ep_degree", config.ep_degree, (EP_VARIABLE, EP_ALIAS)),
        ("--dense", config.dense, (DENSE_VARIABLE, DENSE_ALIAS)),
    )
    for flag, asked, names in groups:
        said = {name: understood[name] for name in names if name in understood}
        if asked is not None:
            said = {flag: str(asked), **said}
        if len(set(said.values())) > 1:
            listed = ", ".join(f"{name} means {value}" for name, value in said.items())
            yield Problem(f"these contradict each other: {listed}", "unset the variable, or leave out the option")
    degree = understood.get(EP_VARIABLE) or understood.get(EP_ALIAS)
    if launch.world_size == 1 and config.ep_degree is None and degree and int(degree) > 1:
        name = EP_VARIABLE if EP_VARIABLE in understood else EP_ALIAS
        yield Problem(f"{name}={degree} asks to shard, but this run is one process", f"use torchrun, or unset {name}")


def _meaning(name: str, world: int) -> str:
    if name in (EP_VARIABLE, EP_ALIAS):
        return "a whole number from 1 on: the ranks that hold one copy of the experts together"
    if name == DENSE_VARIABLE:
        return f"{' or '.join(DENSE_CHOICES)}"
    return (
        f"1 (replicated) or the number of ranks, {world} (fsdp)" if world > 1 else "unset it: this run is one process"
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
