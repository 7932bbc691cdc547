"""The command line: what it takes, what it refuses and how fast, and its exit codes."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hf_ptq import cli
from hf_ptq.config import RunConfig
from hf_ptq.errors import Problem, RunError, UserError

ROOT = Path(__file__).resolve().parents[2]
FLAGS = {
    "--pyt_ckpt_path", "--model", "--revision", "--trust_remote_code", "--attn_implementation",
    "--experts_implementation", "--report_html", "--qformat", "--recipe", "--kv_cache_qformat", "--dataset",
    "--calib_size", "--calib_seq", "--batch_size", "--export_path", "--overwrite", "--max_shard_size", "--durable",
    "--export_fmt", "--vllm_fakequant_export",
    "--no-durable", "--ep_degree", "--dense", "--use_fsdp2", "--timeout_minutes", "--device", "--use_seq_device_map",
    "--gpu_max_mem_percentage", "--max_gpu_memory_gb", "--max_cpu_memory_gb", "--offload_folder", "--skip_generate",
    "--dry_run", "--seed", "--verbose", "--no-verbose", "--list", "--version",
}  # fmt: skip


@pytest.fixture
def source(tmp_path):
    """A directory that looks like a checkpoint from outside: config.json and one safetensors file without tensors."""
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return directory


@pytest.fixture
def sound(source, tmp_path):
    """The options of a request with nothing wrong."""
    return ["--model", str(source), "--export_path", str(tmp_path / "out"), "--dataset", "pydoc", "--device", "cpu"]


@pytest.fixture
def run_with(monkeypatch):
    """Puts a function in the place of hf_ptq.run.run."""

    def put(function):
        module = ModuleType("hf_ptq.run")
        module.run = function
        monkeypatch.setitem(sys.modules, "hf_ptq.run", module)

    return put


def refused(capsys, *words):
    """What a refused request prints; its exit code is 2 and standard output stays empty."""
    assert cli.main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


# ---- what is taken


def test_the_flags_are_those_of_the_design():
    command = cli._command()
    assert {name for p in command.params for name in (*p.opts, *p.secondary_opts)} == FLAGS


def test_every_option_says_what_it_does_and_its_default():
    for param in cli._command().params:
        assert len(param.help) > 20, param.name
        shown_by_typer = param.default is not None and param.default is not False
        shows_default = shown_by_typer or "Default:" in param.help or "Required" in param.help
        assert shows_default or param.name in ("show_list", "show_version"), param.name


def test_defaults_are_those_of_the_config():
    config, problems = cli.to_config(cli.Options(model="m"))
    assert problems == []
    assert config == RunConfig(model="m", export_path=Path("exported_model"))


def test_every_option_arrives(run_with, sound, source, tmp_path):
    got = []
    run_with(got.append)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "x"}\n')
    words = [
        *sound, "--qformat", "nvfp4", "--kv-cache-qformat", "none", "--overwrite", "--max-shard-size=500MB",
        "--no-durable", "--dataset", f"pydoc,{rows}", "--calib_size", "4,5", "--calib-seq", "64", "--batch_size",
        "2", "--attn_implementation", "eager", "--ep_degree", "1", "--dense", "fsdp", "--use-fsdp2",
        "--timeout_minutes", "2.5", "--trust-remote-code", "--skip_generate", "--dry-run", "--no-verbose", "--seed",
        "7",
    ]  # fmt: skip
    assert cli.main(words) == 0
    assert got == [
        RunConfig(
            model=str(source),
            export_path=tmp_path / "out",
            qformat="nvfp4",
            kv_cache_qformat="none",
            overwrite=True,
            max_shard_bytes=500_000_000,
            durable=False,
            datasets=("pydoc", str(rows)),
            calib_sizes=(4, 5),
            calib_seq=64,
            batch_size=2,
            device="cpu",
            attn_implementation="eager",
            ep_degree=1,
            dense="fsdp",
            use_fsdp2=True,
            timeout_minutes=2.5,
            trust_remote_code=True,
            skip_generate=True,
            dry_run=True,
            verbose=False,
            seed=7,
        )
    ]


def test_the_options_of_a_device_map_arrive(tmp_path):
    words = ["--use-seq-device-map", "--gpu_max_mem_percentage", "0.7", "--max_gpu_memory_gb", "20"]
    words += ["--max-cpu-memory-gb", "2.5"]
    options = cli._read(["--model", "m", *words, "--offload_folder", str(tmp_path)])
    config, problems = cli.to_config(options)
    assert problems == []
    assert config == RunConfig(
        model="m",
        export_path=Path("exported_model"),
        use_seq_device_map=True,
        gpu_max_mem_percentage=0.7,
        max_gpu_memory_gb=20,
        max_cpu_memory_gb=2.5,
        offload_folder=tmp_path,
    )


@pytest.mark.parametrize("spelled", ["--export_path", "--export-path"])
@pytest.mark.parametrize("model_flag", ["--pyt_ckpt_path", "--pyt-ckpt-path", "--model"])
def test_hyphens_and_underscores_are_one(spelled, model_flag):
    options = cli._read([model_flag, "m", spelled, "a-b_c"])
    assert (options.model, options.export_path) == ("m", Path("a-b_c"))


# ---- what is refused


def test_unknown_words_are_refused_together_with_the_nearest_names(capsys):
    err = refused(capsys, "--qformt", "nvfp4", "--calib-sise=4", "--model", "--export_path", "stray", "--verbos")
    assert "no option --qformt" in err
    assert "nearest: --qformat" in err
    assert "no option --calib_sise" in err
    assert "--calib_size" in err
    assert "'stray' belongs to no option" in err
    assert "nearest: --verbose" in err
    assert "'nvfp4'" not in err, "the value of an unknown option is not a second problem"


@pytest.mark.parametrize("flag", cli.NOT_BUILT)
def test_flags_of_the_peer_that_are_not_built_say_so_in_one_line(capsys, flag):
    err = refused(capsys, "--model", "demo", flag.replace("_", "-"), "1")
    (line,) = [line for line in err.splitlines() if flag in line]
    assert "is not built" in line
    assert cli.NOT_BUILT[flag] in line


def test_what_is_used_in_place_of_a_flag_exists():
    for flag, instead in cli.NOT_BUILT.items():
        assert flag not in FLAGS
        for word in instead.replace(",", " ").replace(";", " ").split():
            assert not word.startswith("--") or word in FLAGS, (flag, word)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model"], "'--model' requires an argument"),
        (["--batch_size", "x"], "'--batch_size'"),
        (["--seed", "1.5"], "'--seed'"),
        (["--overwrite=yes"], "--overwrite"),
    ],
)
def test_values_that_cannot_be_read(capsys, words, named):
    assert named in refused(capsys, *words)


def test_all_problems_of_a_request_come_at_once(capsys, source, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("HF_PTQ_EP_DEGREE", "two")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("rules: []\ncolour: red\n")
    err = refused(
        capsys, "--model", source, "--revision", "main", "--recipe", recipe, "--qformat", "nvfp4",
        "--kv_cache_qformat", "fp8_csat", "--export_path", source, "--max_shard_size", "5XB", "--dataset",
        "cnn_dailymial,pydoc", "--calib_size", "0,x,3", "--calib_seq", "0", "--batch_size", "-1", "--seed", "-1",
        "--device", "gpu", "--ep_degree", "0", "--dense", "shared", "--timeout_minutes", "0",
    )  # fmt: skip
    for named in (
        "WORLD_SIZE is 4, but RANK, MASTER_ADDR, MASTER_PORT is not set",
        "HF_PTQ_EP_DEGREE='two' cannot be used",
        "--revision main names a version on the hub",
        "--recipe",
        "both say what is quantized",
        "unknown key 'colour'",
        "fp8_cast",
        str(source),
        "'5XB' is no size",
        "cnn_dailymail",
        "'x' in '0,x,3' is no whole number",
        "--calib_seq 0 is less than 1",
        "--batch_size -1 is less than 0",
        "--seed -1 is less than 0",
        "--device 'gpu' is no device",
        "--ep_degree 0 is less than 1",
        "--dense 'shared' is not known",
        "--timeout_minutes 0 is no time",
    ):
        assert named in err, named
    assert "reasons:" in err.splitlines()[0]
    assert "->" in err


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--qformat", "nvfp5"], "nearest: nvfp4"),
        (["--qformat", ""], "--qformat is empty"),  # as from a script's variable that is not set
        (["--recipe", ""], "--recipe is empty"),
        (["--export_fmt", ""], "--export_fmt is empty"),
        (["--calib_size", "0"], "--calib_size 0"),
        (["--calib_size", "1,2,3", "--dataset", "pydoc,c4"], "3 numbers"),
        (["--dataset", "cnn_dayly"], "cnn_dailymail"),
        (["--model", "/nosuch/model"], "/nosuch/model"),
        (["--recipe", "/nosuch/recipe.yaml"], "/nosuch/recipe.yaml"),
        (["--max_shard_size", "0"], "--max_shard_size 0 is less than 1"),
        (["--ep_degree", "0"], "--ep_degree 0 is less than 1"),
        (["--ep_degree", "2"], "an expert-parallel degree of 2 does not divide the 1 ranks"),
        (["--dense", "fsdp"], "the dense part cannot be sharded over one process"),
        (["--dense", "shared"], "--dense 'shared' is not known"),
        (["--timeout_minutes", "nan"], "--timeout_minutes nan is no time"),
    ],
)
def test_one_wrong_value_is_one_problem(capsys, sound, changed, named):
    err = refused(capsys, *sound, *changed)
    assert named in err
    assert err.startswith("hf-ptq: this request cannot be carried out: "), "one problem, no list"


def test_a_missing_model_is_told(capsys, tmp_path):
    assert "--model is missing" in refused(capsys, "--export_path", tmp_path / "out")


def test_one_rank_under_torchrun_is_let_in(run_with, sound, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    run_with(lambda config: None)
    assert cli.main(sound) == 0


# ---- several ranks


@pytest.fixture
def as_rank(monkeypatch):
    """Sets the variables that torchrun sets for this rank of two."""

    def put(rank, nodes=1):
        values = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank // nodes, "LOCAL_WORLD_SIZE": 2 // nodes}
        values |= {"GROUP_RANK": rank if nodes > 1 else 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return put


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_tells_and_the_others_give_it_time(capsys, sound, as_rank, monkeypatch, rank):
    as_rank(rank)
    slept = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    err = refused(capsys, *sound, "--qformat", "nvfp5", "--device", "cuda:1")
    assert slept == [10] * rank
    assert "--device cuda:1 would put all 2 ranks on one GPU" in err
    start = "hf-ptq: this request cannot be carried out, for "
    assert err.startswith(f"rank 1 (node 0, {socket.gethostname()}): {start}" if rank else start)


@pytest.mark.parametrize("rank", [0, 1])
def test_files_are_the_first_ranks_business(capsys, sound, as_rank, monkeypatch, rank, tmp_path):
    """Another node may not have them; what the first finds, all are told."""
    as_rank(rank)
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)
    err = refused(capsys, *sound, "--dataset", str(tmp_path / "nosuch.jsonl"), "--qformat", "nvfp5")
    assert ("nosuch.jsonl" in err) == (rank == 0)
    assert "nearest: nvfp4" in err


def test_other_nodes_are_told_of_an_end_before_the_ranks_have_met(sound, as_rank, monkeypatch):
    from hf_ptq.distributed import process_group

    told = []
    monkeypatch.setattr(process_group, "tell_other_nodes", lambda launch, text: told.append((launch.node, text)))
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)
    as_rank(1, nodes=2)
    assert cli.main([*sound, "--qformat", "nvfp5"]) == 2
    ((node, text),) = told
    assert node == 1
    assert "nvfp5" in text


def test_a_rank_that_is_done_leaves_without_the_interpreters_exit(run_with, sound, as_rank, monkeypatch):
    ended = []
    monkeypatch.setattr(cli.os, "_exit", ended.append)
    run_with(lambda config: None)
    assert cli.main(sound) == 0
    assert ended == []
    as_rank(1)
    assert cli.main(sound) == 0
    assert ended == [0]


# ---- exit codes and what is printed


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [
        (UserError(Problem("no place", "make some")), 2, "hf-ptq: this request cannot be carried out: no place"),
        (RunError("disk full"), 1, "hf-ptq: the run failed: disk full"),
        (RunError("a", "b"), 1, "hf-ptq: the run failed, for 2 reasons:"),
        (KeyboardInterrupt(), 130, "hf-ptq: interrupted"),
    ],
)
def test_exit_codes(run_with, sound, capsys, error, code, start):
    def fail(config):
        raise error

    run_with(fail)
    assert cli.main(sound) == code
    err = capsys.readouterr().err
    assert err.startswith(start)
    assert "Traceback" not in err


@pytest.mark.parametrize("verbose", [True, False])
def test_a_bug_of_ours_exits_1_with_its_place(run_with, sound, capsys, verbose):
    def deep(config):
        raise ZeroDivisionError("in the deep")

    def fail(config):
        deep(config)

    run_with(fail)
    assert cli.main(sound if verbose else [*sound, "--no_verbose"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: in the deep" in err
    assert "in deep" in err
    assert ("in fail" in err) == verbose, "only the last frame unless verbose"


def test_system_exit_is_left_alone(run_with, sound):
    run_with(lambda config: sys.exit(5))
    with pytest.raises(SystemExit, match="5"):
        cli.main(sound)


# ---- speed: no torch, and under a second
