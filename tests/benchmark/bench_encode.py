"""How fast weights are encoded on one GPU, beside a plain copy of the same tensor.

    PYTHONPATH=. python tests/benchmark/bench_encode.py [--gb 10] [--formats fp8 nvfp4] [--num_warps 4] [--tile_rows 8]

GB/s count the bytes that must be read and written: a copy reads and writes the weight; an encode reads the weight and
writes its stored tensors; where the rounded weight is left in place, it writes the weight as well. What is timed:

    amax    the range of every matrix or row: one pass that reads the weight
    encode  by torch: the codec's `encode`, in the exporter's parts. By the kernel: what it does at least, which is
            decoding and the sums of w^2 and (decoded - w)^2 too
    step    the exporter's whole step: encode, decode, sums, and the rounded weight left in the model

`of copy`: the GB/s as a share of the plain copy's. Torch is timed on a part of the experts, 2 GB of weights, since its
time is proportional; a kernel on all.
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
from hf_ptq.quantization.formats.ranges import Ranges, parts, weight_amax

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


def encode_parts(name: str, weight: torch.Tensor, ranges: Ranges) -> None:
    """The codec's encode alone, part by part as the exporter does it."""
    fmt, shape = FORMATS[name], tuple(weight.shape)
    layout = formats.codecs()[name].layout
    stored = {n: torch.empty(size, dtype=dtype, device=weight.device) for n, (dtype, size) in layout(shape).items()}
    for index in parts(shape, tensors.PART_ELEMENTS, fmt.row_step):
        for local, values in formats.encode(fmt, weight[index], ranges.of_part(fmt, index)).items():
            stored[local][tensors._stored_index(layout, local, index, shape)] = values


def measure(name: str, weight: torch.Tensor, copy: float, path: str, repeats: int) -> dict[str, str]:
    """Time one format's encode and step; prints both, returns the shares of the copy's GB/s as cells of a table."""
    ranges = Ranges(weight_amax(weight, FORMATS[name]))
    moved = num_bytes(weight) + stored_bytes(name, tuple(weight.shape))
    works = {
        "encode": lambda: tensors._encode(FORMATS[name], weight, ranges, False),
        "step": lambda: tensors._encode(FORMATS[name], weight, ranges, True),
    }
    if path == "torch":
        works["encode"] = lambda: encode_parts(name, weight, ranges)
    cells = {}
    for what, work in works.items():
        size = moved + num_bytes(weight) * (what == "step")
        rate = show(name, f"{what}, {path}", seconds_of(work, repeats), size, copy)
        cells[f"{what}, {path}"] = f"{rate / 1e9:.0f} ({rate / copy:.2f})"
    return cells


def show(name: str, what: str, seconds: float, moved: int, copy: float) -> float:
    """Print one measurement; returns bytes per second."""
    rate = moved / seconds
    line = f"{name:18} {what:16} {moved / 1e9:7.2f} GB {seconds * 1e3:9.2f} ms {rate / 1e9:9.1f} GB/s"
    print(f"{line} {rate / copy:8.3f} of copy", flush=True)
    return rate


def print_table(rows: dict[str, dict[str, str]]) -> None:
    columns = [f"{what}, {path}" for path in ("kernel", "torch") for what in ("encode", "step")]
    print("\n| GB/s (share of a copy) | " + " | ".join(columns) + " |\n|" + " --- |" * (len(columns) + 1))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells.get(column, "") for column in columns) + " |")


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
        each = seconds_of(lambda shared=shared: weight_amax(weight, FORMATS[shared]), args.repeats)
        show("amax", "by row" if shared == "fp8_per_channel" else "by matrix", each, num_bytes(weight), copy)
    kernel_of, rows = tensors.fused, {}
    with torch.no_grad():
        for name in args.formats:
            rows[name] = measure(name, weight, copy, "kernel", args.repeats) if kernel_of(name, weight) else {}
            if not args.no_torch:
                tensors.fused = lambda *_: None
                rows[name] |= measure(name, part, copy, "torch", 3)
                tensors.fused = kernel_of
    print_table(rows)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
