"""One rank of a test: a model of the hub by the library, twice; rank 1 takes the disk for full, and is late once.

torchrun ... hub_loading.py HUB_ID CACHE DIRECTORY
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import hf_ptq
from hf_ptq.checkpoint import room
from hf_ptq.distributed.agreement import first_decides

LATE_SECONDS = 3.0  # longer than rank 0 needs for its download, were it not to wait


def main() -> None:
    hub_id, cache, directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    with hf_ptq.distributed_run("cpu") as state:
        plan = hf_ptq.decide_plan(hub_id, state)
        if not state.is_first:
            real = os.statvfs("/")
            full = os.statvfs_result((real.f_bsize, real.f_frsize, real.f_blocks, 0, 0, *tuple(real)[5:]))
            room.os.statvfs = lambda _: full
        for seconds in (0.0, LATE_SECONDS):
            time.sleep(0.0 if state.is_first else seconds)
            model = hf_ptq.load(hub_id, plan)
            norm = model.model.norm.weight.data
            save_file({"norm": norm}, directory / f"{seconds}-rank-{state.rank}.safetensors")
            first_decides(state, "forget the weights", lambda: forget(cache))


def forget(cache: Path) -> None:
    for link in cache.rglob("*.safetensors"):
        link.resolve().unlink()
        link.unlink()


if __name__ == "__main__":
    main()
