"""How fast weights are encoded on one GPU, beside a plain copy of the same tensor.

    PYTHONPATH=. python tests/benchmark/bench_encode.py [--gb 10] [--formats fp8 nvfp4] [--num_warps 4] [--tile_rows 8]

GB/s count the bytes that must be read and written: a copy reads and writes the weight; an encode reads the weight and
writes its stored tensors, and with the rounded weight left in place, writes the weight as well. Rows of the table:

    amax        the range of every matrix or row, one pass that reads the weight
    encode      the exporter's step without keep_rounded: encode, decode, error sums
    encode+keep the same with the rounded weight left in the model

once by the kernel, where there is one, and once by torch alone. `of copy`: the GB/s as a share of the plain copy's.
Torch is timed on a part of the experts, since its time is proportional; the kernel on all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch

from hf_ptq.export import tensors
from hf_ptq.quantization import formats
from hf_ptq.quantization.formats.description import FORMATS, formats_for

SHAPE = (768, 2048)  # one expert's projection in a mixture of 128 small experts
TORCH_GB = 2.0


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Median seconds on the GPU after one run that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def seconds_of_copy(weight: torch.Tensor, repeats: int) -> float:
    target = torch.empty_like(weight)
    return seconds_of(lambda: target.copy_(weight), repeats)


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def stored_bytes(name: str, shape: tuple[int, ...]) -> int:
    layout = formats.codecs()[name].layout(shape)
    return sum(num_bytes(torch.empty(s, dtype=d, device="meta")) for d, s in layout.values())


def measure(name: str, weight: torch.Tensor, copy: float, path: str, repeats: int) -> None:
    """Print the table's rows for one format."""
    amax = tensors._amax(weight, FORMATS[name])
    stored = stored_bytes(name, tuple(weight.shape))
    for keep in (False, True):
        seconds = seconds_of(lambda keep=keep: tensors._encode(name, weight, amax, keep), repeats)
        show(name, f"encode{'+keep' if keep else ''} {path}", seconds, num_bytes(weight) * (1 + keep) + stored, copy)


def show(name: str, what: str, seconds: float, moved: int, copy: float) -> None:
    rate = moved / seconds
    line = f"{name:18} {what:22} {moved / 1e9:7.2f} GB {seconds * 1e3:9.2f} ms {rate / 1e9:9.1f} GB/s"
    print(f"{line} {rate / copy:8.3f} of copy", flush=True)


def set_kernel(num_warps: int | None, tile_rows: int | None) -> None:
    """Other choices than the product's, to find better ones."""
    from triton.language import constexpr

    from hf_ptq.quantization.formats import kernels

    if num_warps:
        kernels.OPTIONS["num_warps"] = num_warps
    if tile_rows:
        kernels.TILE_ROWS = constexpr(tile_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=10.0, help="bytes of bf16 weights, in units of 10^9")
    parser.add_argument("--formats", nargs="*", default=formats_for("weight"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num_warps", type=int)
    parser.add_argument("--tile_rows", type=int)
    parser.add_argument("--no_torch", action="store_true", help="time the kernels only")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.num_warps or args.tile_rows:
        set_kernel(args.num_warps, args.tile_rows)
    experts = max(4, round(args.gb * 1e9 / (2 * SHAPE[0] * SHAPE[1])))
    torch.manual_seed(0)
    weight = torch.empty((experts, *SHAPE), dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
    part = weight[: max(4, round(experts * min(1.0, TORCH_GB / args.gb)))]
    seconds = seconds_of_copy(weight, args.repeats)
    copy = 2 * num_bytes(weight) / seconds
    versions = f"torch {torch.__version__}, {torch.cuda.get_device_name()}, triton {find_spec('triton') is not None}"
    print(f"{versions}; weights {tuple(weight.shape)} bf16")
    show("copy", "", seconds, 2 * num_bytes(weight), copy)
    for shared in ("nvfp4", "fp8_per_channel"):
        each = seconds_of(lambda shared=shared: tensors._amax(weight, FORMATS[shared]), args.repeats)
        show("amax", "by row" if shared == "fp8_per_channel" else "by matrix", each, num_bytes(weight), copy)
    kernel_of = tensors.fused
    with torch.no_grad():
        for name in args.formats:
            if kernel_of(name, weight) is not None:
                measure(name, weight, copy, "kernel", args.repeats)
            if not args.no_torch:
                tensors.fused = lambda *_: None
                measure(name, part, copy, "torch", 3)
                tensors.fused = kernel_of
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
