"""The batch scripts of slurm/, unchanged but for their CONFIG block, under a real Slurm of two "nodes" on this machine.

Where the machine has no Slurm, one is installed and started (root and apt-get are needed), by a script beside the
checkout. Its configuration and ports are the machine's, so that only one worker of pytest at a time has a cluster.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, SHARED

EP, FSDP2 = ROOT / "slurm" / "multinode_ep_ptq.slurm", ROOT / "slurm" / "multinode_fsdp2_ptq.slurm"
END_OF_CONFIG = "# ---- end of CONFIG "
CLUSTER_SCRIPT = SHARED / "slurm" / "two_node_cluster.sh"
SLURM_CONF = Path("/etc/slurm/slurm.conf")
PREFIX = "hf-ptq-test-slurm-"  # of the directory with a cluster's state: tells ours from others'
RUNNING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}


def configured(script: Path, directory: Path, **values: object) -> Path:
    """A copy of a batch script whose CONFIG has these values (a list makes an array), and no GPUs."""
    config, marker, rest = script.read_text(encoding="utf-8").partition(END_OF_CONFIG)
    assert marker
    config, count = re.subn(r"^#SBATCH --gpus-per-node=\d+\n", "", config, flags=re.MULTILINE)
    assert count == 1
    for name, value in {"NPROC_PER_NODE": 1, **values}.items():
        text = f"({shlex.join(value)})" if isinstance(value, list) else shlex.quote(str(value))
        config, count = re.subn(rf"^{name}=.*$", lambda _, n=name, t=text: f"{n}={t}", config, flags=re.MULTILINE)
        assert count == 1, f"{name} is set {count} times in the CONFIG of {script.name}"
    copy = directory / script.name
    copy.write_text(config + marker + rest, encoding="utf-8")
    return copy


# The cluster


def why_no_slurm() -> str | None:
    """Why this machine cannot have the cluster of the tests, or None."""
    if not CLUSTER_SCRIPT.is_file():
        return f"there is no {CLUSTER_SCRIPT} (set HF_PTQ_SHARED)"
    if os.geteuid() != 0:
        return "only root can install and start Slurm"
    if shutil.which("slurmd") is None and shutil.which("apt-get") is None:
        return "there is neither Slurm nor apt-get"
    if SLURM_CONF.is_file() and "NodeName=n[1-2] " not in SLURM_CONF.read_text():
        return "this machine belongs to a Slurm of its own"
    return None


def call_cluster_script(verb: str, base: Path) -> None:
    # The output goes to a file: daemons that kept a pipe open would hold up whoever reads it to its end.
    with (base / "cluster.log").open("a") as log:
        environment = {**os.environ, "SLURM_TEST_DIR": str(base)}
        command = ["bash", str(CLUSTER_SCRIPT), verb]
        subprocess.run(command, env=environment, stdout=log, stderr=log, check=True, timeout=300)


def is_daemon_of_slurm(pid_file: Path) -> bool:
    try:
        command = Path("/proc", pid_file.read_text().strip(), "cmdline").read_text()  # empty: has ended, nobody waited
    except (FileNotFoundError, ProcessLookupError):
        return False
    return Path(command.partition("\0")[0]).name.startswith("slurm")


def answers() -> bool:
    command = ["scontrol", "ping"]
    return bool(shutil.which(command[0])) and not subprocess.run(command, capture_output=True, check=False).returncode


def stop_cluster(base: Path) -> None:
    """End the jobs, which would outlive the daemons, then these, and wait: the next cluster needs their ports."""
    deadline = time.monotonic() + 60
    if answers():
        query("scancel", "--partition", "test")
        while query("squeue", "--noheader"):
            assert time.monotonic() < deadline, f"jobs of {base} do not end"
            time.sleep(0.2)
    for pid_file in base.glob("*.pid"):
        if not is_daemon_of_slurm(pid_file):
            pid_file.unlink()  # left by a killed daemon; its number may be another process's by now
    call_cluster_script("stop", base)
    while any(is_daemon_of_slurm(pid_file) for pid_file in base.glob("*.pid")):
        assert time.monotonic() < deadline, f"Slurm did not stop: {base}"
        time.sleep(0.1)
    shutil.rmtree(base, ignore_errors=True)


def stop_what_a_killed_run_left() -> None:
    """Its directory is in the configuration that it wrote."""
    configuration = SLURM_CONF.read_text() if SLURM_CONF.is_file() else ""
    found = re.search(r"^SlurmctldPidFile=(.*)/", configuration, re.MULTILINE)
    if found and Path(found[1]).name.startswith(PREFIX) and Path(found[1]).is_dir():
        stop_cluster(Path(found[1]))


def start_cluster(base: Path) -> None:
    call_cluster_script("start", base)
    deadline = time.monotonic() + 60
    while (states := query("sinfo", "-h", "-N", "-o", "%t").split()) != ["idle", "idle"]:
        assert time.monotonic() < deadline, f"the nodes are {states}"
        time.sleep(0.2)
    query("srun", "--nodes=2", "--ntasks-per-node=1", "true")  # or there is no cluster here, whatever it says


def query(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A running Slurm of the nodes n1 and n2, for this worker alone."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    give_up = pytest.fail if os.environ.get("HF_PTQ_NEEDS_SLURM") else pytest.skip
    with (Path(tempfile.gettempdir()) / "hf-ptq-test-slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stop_what_a_killed_run_left()
        if answers():
            give_up("a Slurm is running here that these tests did not start")
        base = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            try:
                start_cluster(base)
            except (subprocess.SubprocessError, AssertionError) as error:
                give_up(f"Slurm cannot be had: {error}\n{(base / 'cluster.log').read_text()[-2000:]}")
            yield
        finally:
            stop_cluster(base)


# Jobs


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    state: str
    exit_code: int
    log: str
    seconds: float


@pytest.fixture
def submit(cluster: None, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Submit a script from a checkout with sbatch and wait for its end, for so many seconds at most.

    The job has this Python first on its PATH, after `path` if that is given. No job outlives its test.
    """
    started: list[str] = []

    def run(
        script: Path, *arguments: str, seconds: float, checkout: Path = ROOT, path: str = "", **environment: str
    ) -> Job:
        log = tmp_path / f"{script.stem}.log"
        places = [path, str(Path(sys.executable).parent), os.environ["PATH"]]
        variables = {"OMP_NUM_THREADS": "1", "PATH": os.pathsep.join(filter(None, places)), **environment}
        command = ["sbatch", "--parsable", "--output", str(log), str(script), *arguments]
        done = subprocess.run(
            command, cwd=checkout, env=os.environ | variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        started.append(done.stdout.strip())
        start = time.monotonic()
        while (job := facts_of(started[-1]))["JobState"] in RUNNING:
            if time.monotonic() > start + seconds:
                pytest.fail(f"{job['JobState']} after {seconds} s:\n{log.read_text() if log.exists() else ''}")
            time.sleep(0.3)
        code, _, signal = job["ExitCode"].partition(":")
        return Job(job["JobState"], int(code) or -int(signal), log.read_text(), time.monotonic() - start)

    yield run
    for number in started:
        subprocess.run(["scancel", number], check=False, capture_output=True)


def facts_of(job: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", query("scontrol", "show", "job", job)))


def nodes_with_versions(log: str) -> set[str]:
    """The nodes that said their versions of everything."""
    version = r"\d+\.\d+\S*"
    line = rf"^(\w+): python {version}, torch {version}, transformers {version}, hf-ptq {version}, driver .+$"
    return set(re.findall(line, log, re.MULTILINE))


# Whole runs


@pytest.mark.parametrize(("script", "model", "plan"), [(EP, "qwen3_moe", "expert-parallel"), (FSDP2, "qwen3", "fsdp2")])
def test_from_sbatch_to_a_checked_export(
    script: Path,
    model: str,
    plan: str,
    tiny: Callable[[str], Path],
    token_rows: Path,
    tmp_path: Path,
    submit: Callable[..., Job],
    check_export: Callable[[Path, Path], None],
) -> None:
    source, export = tiny(model), tmp_path / "exports" / model
    options = [
        "--device",
        "cpu",
        "--dataset",
        str(token_rows),
        "--calib_size",
        "8",
        "--calib_seq",
        "32",
        "--no-durable",
    ]
    values = {"MODEL": source, "EXPORT_PATH": export, "HF_HOME": tmp_path / "hf", "EXTRA_ARGS": options}
    job = submit(configured(script, tmp_path, **values), "--batch_size", "2", seconds=300)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert nodes_with_versions(job.log) == {"n1", "n2"}, job.log
    check_export(source, export)
    report = json.loads((export / "hf_ptq_report.json").read_text())
    assert (report["plan"]["kind"], report["plan"]["world_size"]) == (plan, 2)
    assert all(row["written bytes"] > 0 for row in report["ranks"]), report["ranks"]


def test_a_model_that_is_not_there(tmp_path: Path, submit: Callable[..., Job]) -> None:
    values = {"MODEL": tmp_path / "no-such-model", "EXPORT_PATH": tmp_path / "export", "HF_HOME": tmp_path / "hf"}
    job = submit(configured(EP, tmp_path, **values, EXTRA_ARGS=["--device", "cpu"]), seconds=240)
    assert job.state == "FAILED", job.log
    assert job.exit_code != 0, job.log
    assert "no-such-model" in job.log
    assert not (tmp_path / "export").exists()


# What the scripts do around hf-ptq, shown by stand-ins: a checkout whose hf_ptq only tells how it was called, and, on
# PYTHONPATH, an hf_ptq that cannot be imported before a pip of ours has been called.

TELLS = """
import json, os, sys
from pathlib import Path
told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HF_HOME")} | {"argv": sys.argv[1:]}
Path(os.environ["TOLD"], os.environ["RANK"]).write_text(json.dumps(told))
"""
ONE_FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("rank 1 fails")
time.sleep(600)
"""
NOT_INSTALLED = """
from pathlib import Path
if not Path(__file__).with_name("installed").exists():
    raise ImportError
"""
PIP = """
import sys, time
from pathlib import Path
place = Path(__file__).parent.parent
with (place / "pip_calls").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
time.sleep(2)
(place / "installed").touch()
"""


def write_files(directory: Path, **files: str) -> Path:
    """Python files by their paths, `__` for `/` and without the ending."""
    for name, text in files.items():
        path = directory / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def stand_in(directory: Path, main: str) -> tuple[Path, Path]:
    """The checkout, and the directory for PYTHONPATH."""
    checkout = write_files(directory / "check out", hf_ptq____init__="", hf_ptq____main__=main)
    return checkout, write_files(directory / "packages", hf_ptq=NOT_INSTALLED, pip____init__="", pip____main__=PIP)


def test_arguments_arrive_unchanged_and_one_node_at_a_time_installs(tmp_path: Path, submit: Callable[..., Job]) -> None:
    checkout, packages = stand_in(tmp_path, TELLS)
    export, extra, given = tmp_path / "an export", ["--dataset", "a b,c"], ["--revision", "x  y", "$HOME *", "'\"", ""]
    values = {"MODEL": "a/model", "RECIPE": "my recipe.yaml", "EXPORT_PATH": export, "HF_HOME": tmp_path / "hf home"}
    script = configured(EP, tmp_path, **values, EXTRA_ARGS=extra)
    environment = {"PYTHONPATH": str(packages), "TOLD": str(tmp_path)}
    job = submit(script, *given, checkout=checkout, seconds=240, **environment)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    for rank in ("0", "1"):
        assert json.loads((tmp_path / rank).read_text()) == {
            "RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "2", "HF_HOME": str(tmp_path / "hf home"),
            "argv": [
                "--pyt_ckpt_path", "a/model", "--recipe", "my recipe.yaml", "--kv_cache_qformat", "fp8",
                "--export_path", str(export), *extra, *given,
            ],
        }  # fmt: skip
    assert (packages / "pip_calls").read_text() == "install --quiet .\n", "the second node waits, and finds it there"
    assert nodes_with_versions(job.log) == {"n1", "n2"}, job.log


def test_a_node_that_fails_ends_the_others_and_a_missing_lock_stops_nobody(
    tmp_path: Path, submit: Callable[..., Job]
) -> None:
    checkout, packages = stand_in(tmp_path, ONE_FAILS)
    flock = tmp_path / "bin" / "flock"
    flock.parent.mkdir()
    flock.write_text("#!/bin/sh\nexit 71\n")  # what flock says on a file system without locks
    flock.chmod(0o755)
    values = {"EXPORT_PATH": tmp_path / "export", "HF_HOME": tmp_path / "hf"}
    script = configured(FSDP2, tmp_path, **values)
    job = submit(script, checkout=checkout, seconds=240, path=str(flock.parent), PYTHONPATH=str(packages))
    assert job.state == "FAILED", job.log
    assert job.exit_code > 0, job.log
    assert "rank 1 fails" in job.log
    assert "going on without" in job.log
    assert nodes_with_versions(job.log) == {"n1", "n2"}, job.log


# What needs no cluster


def test_the_scripts_differ_in_their_configuration_and_one_flag() -> None:
    rests = [script.read_text().partition(END_OF_CONFIG)[2] for script in (EP, FSDP2)]
    assert rests[0] == rests[1].replace("-m hf_ptq --use_fsdp2 ", "-m hf_ptq ") != rests[1]


SRUN = """#!{python}
import json, os, sys
from pathlib import Path
Path(os.environ["TOLD"]).write_text(json.dumps(sys.argv[1:]))
"""


@pytest.mark.parametrize(("image", "kv"), [("", ""), ("image.sqsh", "nvfp4")])
def test_the_container(image: str, kv: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A stand-in for srun tells how it was called: with the mounts of all that a run reads and writes, or without.

    With the format of the KV cache too, or without.
    """
    tools, told, model = tmp_path / "bin", tmp_path / "told", tiny("llama")
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\necho node-a\necho node-b\n")
    (tools / "srun").write_text(SRUN.format(python=sys.executable))
    for tool in tools.iterdir():
        tool.chmod(0o755)
    values = {"IMAGE": image, "MOUNTS": "/data:/data", "MODEL": model, "EXPORT_PATH": tmp_path / "e" / "x"}
    values |= {"KV_CACHE_QFORMAT": kv}
    script = configured(FSDP2, tmp_path, **values, HF_HOME=tmp_path / "h")
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node-[a-b]"}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **job, "SLURM_JOB_NUM_NODES": "2", "PATH": path, "TOLD": str(told)}
    subprocess.run(["bash", str(script)], env=environment, check=True, cwd=tmp_path)
    words = json.loads(told.read_text())
    assert words[words.index("--rdzv_endpoint") + 1] == "node-a:24567"
    assert words[words.index("hf_ptq") + 1] == "--use_fsdp2"
    given = words[words.index("--qformat") + 2 : words.index("--export_path")]
    assert given == (["--kv_cache_qformat", kv] if kv else []), "nothing given: the recipe's own"
    mounts = [*(f"{place}:{place}" for place in (ROOT, tmp_path / "h", tmp_path / "e", model)), "/data:/data"]
    expected = [
        "--container-image=image.sqsh", f"--container-mounts={','.join(mounts)}", f"--container-workdir={ROOT}",
        "--container-writable",
    ]  # fmt: skip
    assert [word for word in words if word.startswith("--container")] == (expected if image else [])


def test_submitted_from_elsewhere(tmp_path: Path) -> None:
    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", str(EP)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "submit from the root" in done.stderr
