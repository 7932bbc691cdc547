"""Ranks fail together (promise P4): a part of the table of `fault_table.py`, small enough for every change.

One fault of each kind, at steps that differ in what the other ranks do meanwhile, over the three plans and two nodes;
and requests that are refused, which one rank says once, however late it is.
"""

from __future__ import annotations

import re
from pathlib import Path

import fault_table
import pytest
from fault_table import Bench, Fault, Outcome, is_temporary

SHORT = ("--skip_generate",)
ONE_NODE = (
    Fault("raise", "load", "EP2", options=SHORT),  # an agreement: all ranks have the error
    Fault("exit", "calibrate", "FSDP2", options=SHORT),  # the others are in a collective
    Fault("memory", "preview", "replicated"),  # the others compute
)
TWO_NODES = (
    Fault("raise", "calibrate", "EP2", 2, 1, "collective", options=SHORT),
    Fault("node", "calibrate", "replicated", 2, 1, "compute", options=SHORT),
)
REFUSALS = {
    "before the ranks meet": (("--qformat", "nvfp9"), "'nvfp9' is no preset (--qformat)"),
    "by all of them": (
        ("--experts_implementation", "eager"),
        "--experts_implementation eager is for runs that are not expert-parallel",
    ),
}


@pytest.fixture(autouse=True)
def _on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run beside others, so they allow more than the 15 s that the table is held against."""
    monkeypatch.setattr(fault_table, "GONE_WITHIN", 40.0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


def keeps_the_promise(outcome: Outcome) -> None:
    assert outcome.wrong == [], "\n".join((outcome.fault.name, *outcome.wrong, *outcome.outputs))


@pytest.mark.parametrize("fault", [*ONE_NODE, *TWO_NODES], ids=lambda fault: fault.name)
def test_the_ranks_fail_together(bench: Bench, fault: Fault) -> None:
    outcome = bench.run(fault)
    keeps_the_promise(outcome)
    cause = {"raise": "the fault of this test", "exit": "exit with code 3", "memory": "CUDA out of memory"}
    assert cause.get(fault.kind, "") in outcome.message
    assert "Traceback" not in "".join(outcome.told) or fault.kind in ("raise", "exit")
    assert sum(" ends: " in line for line in outcome.told) == (fault.nodes - 1) * (fault.kind == "raise")


def test_what_a_killed_run_leaves_is_hidden_and_removed_by_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    killed = bench.run(Fault("kill", "pack", "replicated", rank=0, options=SHORT))
    keeps_the_promise(killed)
    assert list(map(is_temporary, killed.left)) == [True]
    failed = bench.run(Fault("raise", "verify", "replicated", options=SHORT))
    keeps_the_promise(failed)
    assert failed.left == ()


def test_a_rank_that_does_not_arrive_is_named_after_the_timeout(bench: Bench) -> None:
    outcome = bench.run(Fault("hang", "load", "EP2", timeout_seconds=15))
    keeps_the_promise(outcome)
    waits = r"rank 0 \(.*\) waited 0.25 minutes in step 'load' for rank 1 \(.*\) in step 'load' \(faulty.py:\d+ fail\)"
    assert re.search(waits, outcome.message)
    assert outcome.seconds > 14.5


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_said_once_by_a_first_rank_that_is_late(bench: Bench, case: str) -> None:
    options, what = REFUSALS[case]
    outcome = bench.run(Fault(rank=0, late_seconds=3, options=options))
    assert outcome.codes == (1,)
    assert [line for line in outcome.told if what in line] == [f"hf-ptq: this request cannot be carried out: {what}"], (
        outcome.outputs[0]
    )
    assert what not in outcome.outputs[0].partition("torch.distributed.elastic")[2]
    assert outcome.left == ()
