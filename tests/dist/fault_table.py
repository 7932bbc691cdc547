"""Promise P4 as a table: what becomes of a run when one of its ranks breaks, by kind of fault, step and plan.

    python tests/dist/fault_table.py [--quick] [--only WORD ...]

A row is one run of `faulty.py` under torchrun: the seconds from the fault until every process of the run is gone (by
their ids, launchers included), the launchers' exit codes, the line that names the rank and the step, and what lies
beside the export path. The second table has two launchers, as on two nodes, with the fault on the second one while the
others compute, sit in a collective, or wait in an agreement. All runs have one export path: what a killed one leaves
has to be removed by the next. The last row is a run without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from ranks import environment  # noqa: E402
from tiny import save_tiny  # noqa: E402

FAULTY = Path(__file__).with_name("faulty.py")
GONE_WITHIN = 15.0  # seconds
PATIENCE = 60.0  # seconds after a fault until what is left of the run is killed
START = 400.0  # seconds that a run has to come to its fault, or to its end
KINDS = ("raise", "kill", "exit", "memory")
PLANS: dict[str, tuple[str, ...]] = {"EP2": (), "FSDP2": ("--use_fsdp2",), "replicated": ("--ep_degree", "1")}
# Step of the fault -> what messages call it. Rank 0 alone writes the index; elsewhere the last rank breaks.
STEPS = {
    "resolve": "see the source",
    "load": "load",
    "preview": "preview before",
    "calibrate": "calibrate",
    "pack": "quantize",
    "write": "finish the files",
    "index": "write the index and the configuration",
    "verify": "verify",
}
# What the ranks of the other node do -> (step of the fault, plan).
PEERS = {
    "compute": ("calibrate", "replicated"),
    "collective": ("calibrate", "EP2"),
    "agreement": ("pack", "replicated"),
}


@dataclass(frozen=True)
class Fault:
    """One run with a fault; no kind: without one."""

    kind: str = ""
    step: str = ""
    plan: str = "EP2"
    nodes: int = 1
    ranks_per_node: int = 2
    peers: str = ""  # what they do meanwhile
    rank: int | None = None
    late_seconds: float = 0.0
    timeout_seconds: float = 0.0  # for ranks that do not arrive
    options: tuple[str, ...] = ()

    @property
    def broken(self) -> int:
        """The rank with the fault."""
        if self.rank is not None:
            return self.rank
        return 0 if self.step == "index" else self.nodes * self.ranks_per_node - 1

    @property
    def name(self) -> str:
        where = f", {self.nodes} x {self.ranks_per_node}, peers: {self.peers}" if self.nodes > 1 else ""
        return f"{self.kind or 'no fault'} {self.step} {self.plan}{where}"

    @property
    def words(self) -> list[str]:
        """The options of the command that are this fault's."""
        timeout = ("--timeout_minutes", str(self.timeout_seconds / 60)) if self.timeout_seconds else ()
        return [*PLANS[self.plan], *timeout, *self.options]

    def variables(self, directory: Path) -> dict[str, str]:
        return {
            "FAULT_DIRECTORY": str(directory),
            "FAULT_KIND": self.kind,
            "FAULT_STEP": self.step,
            "FAULT_RANK": str(self.broken),
            "FAULT_DELAY": "1" if self.peers else "0",
            "FAULT_PEERS": self.peers,
            "FAULT_LATE_SECONDS": str(self.late_seconds),
        }


@dataclass(frozen=True)
class Outcome:
    """What was seen of a run."""

    fault: Fault
    seconds: float  # from the fault until all processes were gone; infinite if some were not, or no fault came
    codes: tuple[int, ...]  # the launchers' exit codes
    outputs: tuple[str, ...]  # the launchers'
    left: tuple[str, ...]  # beside and at the export path

    @property
    def told(self) -> list[str]:
        """The lines of the ranks, without torchrun's account of the failure."""
        lines: list[str] = []
        for output in self.outputs:
            own = re.split(r"^E\d{4} .*failed \(exitcode", output, maxsplit=1, flags=re.MULTILINE)[0]
            lines += [line for line in own.splitlines() if not re.match(r"[WEI]\d{4} ", line)]
        return lines

    @property
    def messages(self) -> list[str]:
        """The lines that name the rank and the step; of a killed one a survivor says it. Other nodes' echo is last."""
        fault = self.fault
        wanted = rf"rank {fault.broken} .*step '{re.escape(STEPS.get(fault.step, ''))}'"
        if fault.kind in ("kill", "node"):
            wanted += r"|(no sign of life|connection to another rank broke|rendezvous store is gone)"
        found = [line.strip() for line in self.told if re.search(wanted, line)]
        return sorted(found, key=is_echo)

    @property
    def message(self) -> str:
        """The first of them; for a killed rank torchrun's account may stand for it; empty if there is none."""
        accounts = {
            "kill": rf"rank +: {self.fault.broken} .*\n +exitcode +: -9",
            "node": "RendezvousConnectionError: .*",
        }
        account = re.search(accounts.get(self.fault.kind, "$^"), "\n".join(self.outputs))
        if not self.messages and account:
            return f"(torchrun) {' '.join(account[0].split())}"
        return next(iter(self.messages), "")

    @property
    def wrong(self) -> list[str]:
        """How the run breaks the promise; empty if it does not."""
        allowed = GONE_WITHIN + self.fault.timeout_seconds
        found = [f"the processes were gone after {self.seconds:.1f} s"] * (self.seconds > allowed)
        found += ["an exit code of 0"] * (0 in self.codes)
        found += ["no message names the rank and the step"] * (not self.message)
        times = sum(not is_echo(line) for line in self.messages)
        found += [f"the message is there {times} times"] * (times > 1)
        is_killed = self.fault.kind in ("kill", "node")
        bad = [name for name in self.left if not (is_killed and is_temporary(name))]
        return found + [f"left behind: {', '.join(bad)}"] * bool(bad)


def is_echo(line: str) -> bool:
    """One rank of every other node says why it ends."""
    return " ends: " in line


def is_temporary(name: str) -> bool:
    """A hidden name that says whose it is."""
    return re.fullmatch(r"\.out\.hf-ptq-.+-\d+\.tmp", name) is not None


@dataclass
class Bench:
    """A tiny mixture of experts, rows to calibrate with, and the place of all exports."""

    directory: Path
    runs: int = 0
    base: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        model = save_tiny("qwen3_moe", self.directory / "model")
        rows = self.directory / "rows.safetensors"
        ids = torch.randint(3, 250, (8, 32), generator=torch.Generator().manual_seed(1))
        save_file({"input_ids": ids}, rows)
        self.exports.mkdir()
        words = ("--model", model, "--dataset", rows, "--batch_size", 1, "--device", "cpu", "--no-durable")
        self.base = (*map(str, words), "--no-verbose", "--qformat", "nvfp4", "--export_path", str(self.exports / "out"))

    @property
    def exports(self) -> Path:
        """The directory that the export path lies in."""
        return self.directory / "exports"

    def run(self, fault: Fault) -> Outcome:
        """Carry out one run, and see its end."""
        self.runs += 1
        directory = self.directory / f"run-{self.runs}"
        directory.mkdir()
        words = [*self.base, *fault.words]
        launchers = []
        try:
            for launcher in start(fault, directory, words):
                launchers.append(launcher)
            seconds = see_the_end(launchers, directory)
        finally:
            end(launchers, directory)
        outputs = tuple((directory / f"output-{node}").read_text(errors="replace") for node in range(fault.nodes))
        left = tuple(sorted(path.name for path in self.exports.iterdir()))
        return Outcome(fault, seconds, tuple(launcher.wait() for launcher in launchers), outputs, left)


def start(fault: Fault, directory: Path, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The launchers of all nodes, the first of which has the store."""
    variables = {**environment(), **fault.variables(directory)}
    port = free_port()
    where = ["--standalone"]
    if fault.nodes > 1:
        where = [f"--nnodes={fault.nodes}", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=1"]
    for node in range(fault.nodes):
        with (directory / f"output-{node}").open("wb") as output:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *where,
                f"--nproc_per_node={fault.ranks_per_node}",
            ]
            yield subprocess.Popen(
                [*command, str(FAULTY), *words],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if fault.nodes > 1 and node == 0:
            wait_for_port(port)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def wait_for_port(port: int) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
            return
        time.sleep(0.1)


def see_the_end(launchers: list[subprocess.Popen[bytes]], directory: Path) -> float:
    """Seconds from the fault until all processes are gone; infinite if they are not, or there was no fault."""
    begun = time.time()
    while True:
        for launcher in launchers:
            launcher.poll()
        found = fault_moment(directory)
        now = time.time()
        if all(map(is_gone, processes(launchers, directory))):
            return now - found if found is not None else float("inf")
        if now > (begun + START if found is None else found + PATIENCE):
            return float("inf")
        time.sleep(0.05)


def fault_moment(directory: Path) -> float | None:
    path = directory / "moment"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return float(text) if text else None


def processes(launchers: list[subprocess.Popen[bytes]], directory: Path) -> set[int]:
    """The launchers and the ranks."""
    ranks = (path.read_text(encoding="utf-8").split() for path in directory.glob("process-*"))
    return {launcher.pid for launcher in launchers} | {int(words[0]) for words in ranks if words}


def is_gone(process: int) -> bool:
    """Dead, or dead and not yet asked for its exit code."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def end(launchers: list[subprocess.Popen[bytes]], directory: Path) -> None:
    """Kill what is still there."""
    for process in processes(launchers, directory):
        if not is_gone(process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


# --- the table -------------------------------------------------------------------------------------


def one_node() -> Iterator[Fault]:
    for plan in PLANS:
        for step in STEPS:
            for kind in KINDS:
                yield Fault(kind, step, plan)
    for step, plan in PEERS.values():
        yield Fault("hang", step, plan, timeout_seconds=6)


def two_nodes() -> Iterator[Fault]:
    for peers, (step, plan) in PEERS.items():
        for ranks in (1, 2):
            for kind in ("raise", "kill", "node"):
                yield Fault(kind, step, plan, 2, ranks, peers)
    yield Fault("node", "calibrate", "replicated", 2, 1, "compute", rank=0)  # which has the store


def is_quick(fault: Fault) -> bool:
    """Every kind, step and plan, and what the peers do, in a tenth of the runs."""
    if fault.kind == "hang":
        return fault.step == "pack"
    if fault.nodes > 1:
        return (fault.kind, fault.ranks_per_node) in (("raise", 2), ("node", 1))
    place = list(STEPS).index(fault.step)
    return KINDS[place % 4] == fault.kind and list(PLANS)[place % 3] == fault.plan


def row(outcome: Outcome) -> str:
    """A row of the table; what is wrong stands in the last column."""
    fault, message = outcome.fault, outcome.message.replace("|", "\\|")
    seconds = f"{outcome.seconds:.1f}" if outcome.fault.kind else "-"
    left = ", ".join("hidden temporary" if is_temporary(name) else name for name in outcome.left) or "nothing"
    wrong = "; ".join(outcome.wrong) if fault.kind else "" if outcome.codes == (0,) else "the run failed"
    name = f"{fault.kind or 'none'} | {fault.step} | {fault.plan}"
    where = f" | {fault.nodes} x {fault.ranks_per_node}, {fault.peers}" if fault.nodes > 1 else ""
    codes = ", ".join(map(str, outcome.codes))
    return f"| {name}{where} | {seconds} | {codes} | {message[:160]} | {left} | {wrong} |"


def main() -> int:
    """Run the rows that are asked for and print them; 1 if one breaks the promise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    parser.add_argument("--only", nargs="*", default=[], help="rows that have all these words, as: raise load FSDP2")
    asked = parser.parse_args()
    columns = "seconds | exit code | message | left | wrong |"
    broken = 0
    with tempfile.TemporaryDirectory(prefix="hf-ptq-faults-") as directory:
        bench = Bench(Path(directory))
        tables = (("kind | step | plan", one_node()), ("kind | step | plan | nodes and peers", two_nodes()))
        for head, faults in (*tables, ("kind | step | plan", iter([Fault()]))):
            chosen = [f for f in faults if (not asked.quick or not f.kind or is_quick(f))]
            chosen = [f for f in chosen if not f.kind or all(w in re.findall(r"\w+", f.name) for w in asked.only)]
            if chosen:
                print(f"\n| {head} | {columns}\n" + re.sub(r"[^|]+", " --- ", f"| {head} | {columns}"), flush=True)
            for fault in chosen:
                outcome = bench.run(fault)
                print(row(outcome), flush=True)
                broken += bool(outcome.wrong) if fault.kind else outcome.codes != (0,) or outcome.left != ("out",)
    print(f"\n{broken} rows break the promise")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
