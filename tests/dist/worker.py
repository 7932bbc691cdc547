"""One rank of a test: carries out the requests of a JSON file one after the other, as `hf-ptq` would.

    torchrun ... worker.py REQUESTS.json

A request is the keyword arguments of RunConfig; each is a run of its own, with its own process group. What every rank
told, and how many collectives it took part in, is left beside each export, for the test to read.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_ptq import steps
from hf_ptq.config import RunConfig
from hf_ptq.report import Report
from hf_ptq.run import run


class Collectives(TorchDispatchMode):
    """Counts the collectives inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        self.count += name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name
        return func(*args, **(kwargs or {}))


def main() -> None:
    torch.set_num_threads(1)
    steps.PREVIEW_TOKENS = 4
    for request in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        paths = {key: Path(request[key]) for key in ("export_path",)}
        lists = {key: tuple(request[key]) for key in ("datasets", "calib_sizes") if key in request}
        report = Report(Console(quiet=True), verbose=False)
        with Collectives() as collectives:
            run(RunConfig(**{**request, **paths, **lists}), report)
        told = Path(f"{paths['export_path']}-rank{os.environ.get('RANK', '0')}.json")
        told.write_text(json.dumps({**report.as_dict(), "collectives": collectives.count}), encoding="utf-8")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # as the command does
