"""What a process learns from its launcher's variables, and which options and variables go together with it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hf_ptq.config import RunConfig
from hf_ptq.distributed.launch import Launch, Wishes, launch_problems, option_problems, read_launch, read_wishes
from hf_ptq.errors import Problem

MEET = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
ONE, FOUR = Launch(), Launch(world_size=4, local_world_size=4)
EP, EP_ALIAS, DENSE, DENSE_ALIAS = "HF_PTQ_EP_DEGREE", "MODELOPT_EP_DEGREE", "HF_PTQ_DENSE", "MODELOPT_FSDP_SIZE"


def as_torchrun(rank: int, per_node: int, nodes: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    sizes = {"WORLD_SIZE": per_node * nodes, "LOCAL_WORLD_SIZE": per_node, "GROUP_WORLD_SIZE": nodes}
    places = {"RANK": rank, "LOCAL_RANK": rank % per_node, "GROUP_RANK": rank // per_node}
    return MEET | {name: str(value) for name, value in (sizes | places).items()}


def wrong(launch: Launch, environ: dict[str, str], **options: object) -> list[Problem]:
    config = RunConfig(**{"model": "org/name", "export_path": Path("out"), **options})
    return list(option_problems(config, launch, environ))


def wishes(launch: Launch, environ: dict[str, str], **options: object) -> Wishes:
    return read_wishes(RunConfig("org/name", Path("out"), **options), launch, environ)


# ---- the launch


@pytest.mark.parametrize(("per_node", "nodes"), [(1, 1), (4, 1), (2, 3), (1, 2)])
def test_torchruns_variables(per_node: int, nodes: int) -> None:
    for rank in range(per_node * nodes):
        environ = as_torchrun(rank, per_node, nodes)
        expected = Launch(rank, per_node * nodes, rank % per_node, per_node, rank // per_node, nodes)
        assert read_launch(environ) == expected
        assert launch_problems(environ) == []
        assert expected.name == f"rank {rank} (node {rank // per_node}, {socket.gethostname()})"


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "", "RANK": ""}, {"RANK": "0"}, MEET])
def test_without_a_launcher_there_is_one_process(environ: dict[str, str]) -> None:
    assert read_launch(environ) == Launch(0, 1, 0, 1, 0, 1)
    assert launch_problems(environ) == []


def test_what_a_launcher_does_not_say_is_one_node() -> None:
    """Launchers that set RANK and WORLD_SIZE alone."""
    assert read_launch({**MEET, "RANK": "3", "WORLD_SIZE": "4"}) == Launch(3, 4, 3, 4, 0, 1)
    told = {**MEET, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    assert read_launch(told) == Launch(3, 4, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("changed", "what", "cure"),
    [
        ({"RANK": "x", "LOCAL_RANK": "1.0"}, "no numbers of ranks: RANK='x', LOCAL_RANK='1.0'", "torchrun"),
        ({"RANK": "-1"}, "no numbers of ranks: RANK='-1'", "torchrun"),
        ({"WORLD_SIZE": "0"}, "no numbers of ranks: WORLD_SIZE='0'", "torchrun"),
        ({"LOCAL_WORLD_SIZE": "0"}, "no numbers of ranks: LOCAL_WORLD_SIZE='0'", "torchrun"),
        ({"RANK": ""}, "WORLD_SIZE is 4, but RANK is not set", "unset WORLD_SIZE"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "WORLD_SIZE is 4, but MASTER_ADDR, MASTER_PORT is not set", "unset W"),
        ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4", "unset RANK"),
        ({"WORLD_SIZE": ""}, "RANK is 2, but WORLD_SIZE is not set", "unset RANK"),
    ],
)
def test_broken_variables_are_one_process_and_a_problem(changed: dict[str, str], what: str, cure: str) -> None:
    environ = as_torchrun(2, 4, 1) | changed
    (problem,) = launch_problems(environ)
    assert problem.what == what
    assert "torchrun" in problem.cure
    assert cure in problem.cure
    assert read_launch(environ) == Launch()


def test_srun_without_torchrun() -> None:
    """Each task would be a run of one process, for one export path."""
    (problem,) = launch_problems({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert problem.what == "srun started 2 tasks, each of which would quantize the whole model by itself"
    assert "torchrun" in problem.cure
    assert launch_problems({"SLURM_STEP_NUM_TASKS": "1"}) == []
    assert launch_problems({"SLURM_NTASKS": "8"}) == [], "sbatch's own shell is no task of srun"
    assert launch_problems({"SLURM_STEP_NUM_TASKS": "2", **as_torchrun(1, 1, 2)}) == []


# ---- wishes


@pytest.mark.parametrize(
    ("environ", "options", "expected"),
    [
        ({}, {}, Wishes()),
        ({}, {"ep_degree": 2, "dense": "fsdp", "use_fsdp2": True}, Wishes(2, "fsdp", True)),
        ({EP: "2"}, {}, Wishes(2, None, False, ("HF_PTQ_EP_DEGREE=2 from the environment",))),
        ({DENSE: "fsdp"}, {}, Wishes(None, "fsdp", False, ("HF_PTQ_DENSE=fsdp from the environment",))),
        (
            {EP_ALIAS: "4"},
            {},
            Wishes(4, None, False, ("MODELOPT_EP_DEGREE=4 from the environment (the same as HF_PTQ_EP_DEGREE)",)),
        ),
        (
            {DENSE_ALIAS: "4"},
            {},
            Wishes(None, "fsdp", False, ("MODELOPT_FSDP_SIZE=4 from the environment (the same as HF_PTQ_DENSE)",)),
        ),
        (
            {DENSE_ALIAS: "1"},
            {},
            Wishes(
                None, "replicated", False, ("MODELOPT_FSDP_SIZE=1 from the environment (the same as HF_PTQ_DENSE)",)
            ),
        ),
        ({EP: "x", EP_ALIAS: "0", DENSE: "all", DENSE_ALIAS: "3"}, {}, Wishes()),
        ({EP: "", EP_ALIAS: "", DENSE: "", DENSE_ALIAS: ""}, {}, Wishes()),
    ],
)
def test_wishes_come_from_options_and_variables(environ: dict, options: dict, expected: Wishes) -> None:
    assert wishes(FOUR, environ, **options) == expected


def test_an_option_comes_before_a_variable() -> None:
    assert wishes(FOUR, {EP: "2"}, ep_degree=4).ep_degree == 4
    assert wishes(FOUR, {DENSE: "fsdp"}, dense="replicated").dense == "replicated"
    both = wishes(FOUR, {EP: "2", EP_ALIAS: "2", DENSE: "fsdp", DENSE_ALIAS: "4"})
    assert (both.ep_degree, both.dense, len(both.notes)) == (2, "fsdp", 4)


def test_one_process_has_no_size_that_means_sharding() -> None:
    assert wishes(ONE, {DENSE_ALIAS: "1"}).dense == "replicated"
    assert wishes(ONE, {DENSE_ALIAS: "4"}).dense is None


# ---- options and variables that do not go together


@pytest.mark.parametrize(
    ("launch", "environ", "options"),
    [
        (ONE, {}, {}),
        (ONE, {}, {"device": "cuda:1", "use_seq_device_map": True, "max_gpu_memory_gb": 8.0}),
        (ONE, {EP: "1", EP_ALIAS: "1", DENSE: "replicated", DENSE_ALIAS: "1"}, {}),
        (ONE, {}, {"use_fsdp2": True}),
        (ONE, {}, {"use_fsdp2": True, "dense": "fsdp", "ep_degree": 1}),
        (FOUR, {}, {"device": "cuda"}),
        (FOUR, {EP: "2", EP_ALIAS: "2", DENSE: "fsdp", DENSE_ALIAS: "4"}, {"ep_degree": 2, "dense": "fsdp"}),
        (FOUR, {}, {"use_fsdp2": True, "dense": "fsdp", "ep_degree": 1}),
        (FOUR, {}, {"ep_degree": 4, "dense": "replicated", "device": "cpu"}),
    ],
)
def test_what_goes_together(launch: Launch, environ: dict[str, str], options: dict) -> None:
    assert wrong(launch, environ, **options) == []


CONTRADICT = "these contradict each other: "
SPREADS = "spreads the model of one process; this run has 4 ranks"
DEGREE, DIVISORS = "an expert-parallel degree", "--ep_degree 1, or 2, or 4"


@pytest.mark.parametrize(
    ("launch", "environ", "options", "what", "cure"),
    [
        # variables that say nothing
        (FOUR, {EP: "two"}, {}, "HF_PTQ_EP_DEGREE='two' cannot be used", "a whole number from 1 on"),
        (FOUR, {EP_ALIAS: "0"}, {}, "MODELOPT_EP_DEGREE='0' cannot be used", "a whole number from 1 on"),
        (FOUR, {DENSE: "zero3"}, {}, "HF_PTQ_DENSE='zero3' cannot be used", "replicated or fsdp"),
        (FOUR, {DENSE_ALIAS: "2"}, {}, "MODELOPT_FSDP_SIZE='2' cannot be used", "or the number of ranks, 4"),
        # a flag and variables
        (FOUR, {EP: "2"}, {"ep_degree": 4}, f"{CONTRADICT}--ep_degree means 4, HF_PTQ_EP_DEGREE means 2", "unset the"),
        (FOUR, {EP_ALIAS: "2"}, {"ep_degree": 4}, f"{CONTRADICT}--ep_degree means 4, {EP_ALIAS} means 2", "unset the"),
        (FOUR, {EP: "2", EP_ALIAS: "4"}, {}, f"{CONTRADICT}{EP} means 2, {EP_ALIAS} means 4", "unset the variable"),
        (
            FOUR,
            {DENSE: "replicated"},
            {"dense": "fsdp"},
            f"{CONTRADICT}--dense means fsdp, HF_PTQ_DENSE means replicated",
            "leave out the option",
        ),
        (
            FOUR,
            {DENSE: "replicated", DENSE_ALIAS: "4"},
            {},
            f"{CONTRADICT}HF_PTQ_DENSE means replicated, MODELOPT_FSDP_SIZE means fsdp",
            "unset the variable",
        ),
        # one process cannot shard
        (ONE, {DENSE_ALIAS: "4"}, {}, "MODELOPT_FSDP_SIZE='4' cannot be used", "unset it: this run is one process"),
        (ONE, {DENSE: "fsdp"}, {}, "the dense part cannot be sharded over one process", "leave out HF_PTQ_DENSE"),
        (ONE, {}, {"dense": "fsdp"}, "the dense part cannot be sharded over one process", "leave out --dense fsdp"),
        (ONE, {}, {"ep_degree": 2}, f"{DEGREE} of 2 does not divide the 1 ranks of this run", "--ep_degree 1"),
        # degrees
        (FOUR, {}, {"ep_degree": 3}, f"{DEGREE} of 3 does not divide the 4 ranks", DIVISORS),
        (FOUR, {EP: "3"}, {}, f"{DEGREE} of 3 does not divide the 4 ranks", DIVISORS),
        (FOUR, {}, {"ep_degree": 8}, f"{DEGREE} of 8 does not divide the 4 ranks", DIVISORS),
        # --use_fsdp2
        (FOUR, {}, {"use_fsdp2": True, "ep_degree": 2}, "--use_fsdp2 shards the experts too", "leave out --use_fsdp2"),
        (FOUR, {EP_ALIAS: "4"}, {"use_fsdp2": True}, "--use_fsdp2 shards the experts too", "--dense fsdp"),
        (FOUR, {}, {"use_fsdp2": True, "dense": "replicated"}, "--use_fsdp2 shards the dense part", "one of them"),
        (ONE, {DENSE: "replicated"}, {"use_fsdp2": True}, "--use_fsdp2 shards the dense part", "one of them"),
        # devices
        (FOUR, {}, {"device": "cuda:1"}, "--device cuda:1 would put all 4 ranks on one GPU", "--device cuda:"),
        (FOUR, {}, {"use_seq_device_map": True}, f"--use_seq_device_map {SPREADS}", "--use_fsdp2"),
        (FOUR, {}, {"gpu_max_mem_percentage": 0.5}, "--gpu_max_mem_percentage spreads the model", "run one process"),
        (FOUR, {}, {"max_gpu_memory_gb": 8.0}, "--max_gpu_memory_gb spreads the model", "run one process"),
        (FOUR, {}, {"max_cpu_memory_gb": 0.0}, "--max_cpu_memory_gb spreads the model", "run one process"),
        (FOUR, {}, {"offload_folder": Path("x")}, "--offload_folder spreads the model", "run one process"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(
    launch: Launch, environ: dict[str, str], options: dict, what: str, cure: str
) -> None:
    (problem,) = wrong(launch, environ, **options)
    assert problem.what.startswith(what)
    assert cure in problem.cure


@pytest.mark.parametrize("name", [EP, EP_ALIAS])
def test_a_variable_that_asks_to_shard_one_process(name: str) -> None:
    found = {problem.what: problem.cure for problem in wrong(ONE, {name: "4"})}
    what = f"{name}=4 asks to shard, but this run is one process"
    assert found[what] == f"use torchrun, or unset {name}"
    assert what not in {problem.what for problem in wrong(ONE, {name: "4"}, ep_degree=1)}, "the option decides"


def test_all_problems_come_together() -> None:
    environ = {EP: "x", DENSE: "replicated", DENSE_ALIAS: "4"}
    options = {"ep_degree": 3, "device": "cuda:0", "use_fsdp2": True, "offload_folder": Path("x")}
    found = "\n".join(problem.what for problem in wrong(FOUR, environ, **options))
    for what in ("='x'", "contradict", "degree of 3 does not", "asks for something else", "the dense part", "one GPU"):
        assert what in found, what
    assert found.count("\n") == 6


@pytest.mark.parametrize("degree", [0, -1, -3])
def test_a_degree_below_one_is_left_to_the_options_own_rules(degree: int) -> None:
    assert wrong(FOUR, {}, ep_degree=degree) == []
    config = RunConfig("org/name", Path("out"), ep_degree=degree)
    assert [problem.what for problem in config.problems()] == [f"--ep_degree {degree} is less than 1"]
