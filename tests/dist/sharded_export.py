"""One rank of a test: models loaded under FSDP2, quantized on this rank's rows, exported; and again from the state.

torchrun ... sharded_export.py ROWS.safetensors DIRECTORY SOURCE...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import hf_ptq


def main() -> None:
    torch.set_num_threads(1)
    rows, directory = load_file(sys.argv[1])["input_ids"], Path(sys.argv[2])
    with hf_ptq.distributed_run("cpu") as state:
        mine = [{"input_ids": batch} for batch in rows[state.rank :: state.world_size].split(4)]
        for source in map(Path, sys.argv[3:]):
            plan = hf_ptq.decide_plan(source, state, use_fsdp2=True)
            model = hf_ptq.load(source, plan)
            hf_ptq.quantize(model, "nvfp4", lambda m: hf_ptq.calibration_loop(m, mine))
            hf_ptq.export(model, source, directory / f"{source.name}-direct")
            saved = hf_ptq.quantizer_state(model)
            other = AutoModelForCausalLM.from_pretrained(source)
            for layer in other.model.layers:
                fully_shard(layer)
            fully_shard(other)
            hf_ptq.restore_quantizers(other, saved)
            hf_ptq.export(other, source, directory / f"{source.name}-restored")
            batch = mine[0]["input_ids"]
            other.train()(batch, labels=batch).loss.backward()
            assert all(p.grad is not None for p in other.model.layers[0].self_attn.parameters())


if __name__ == "__main__":
    main()
