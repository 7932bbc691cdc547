"""Which server takes what: the table that `--list` prints, and the warnings of a run. Imports no torch.

From the sources of vLLM 0.33, SGLang 0.5.23, TensorRT-LLM (2026) and transformers 5.24; what of it was run, and where,
is in the README. "experts" stands behind a server that takes a format for routed experts only, "dense" for one that
takes it for everything else only.
"""

from __future__ import annotations

from collections.abc import Iterable

from hf_ptq.export.servers import ALGO_SUPPORT, SGLANG, TRTLLM, VLLM

TRANSFORMERS = "transformers"
ALL = (VLLM, SGLANG, TRTLLM, TRANSFORMERS)
Takers = dict[str, str]  # server -> "", "dense" or "experts"


def _takers(*servers: str, **parts: str) -> Takers:
    return dict.fromkeys(servers, "") | {NAMES[key]: part for key, part in parts.items()}


NAMES = {"vllm": VLLM, "sglang": SGLANG, "transformers": TRANSFORMERS}
# Names of algorithms that servers know and no export of ours has: AWQ's and SVDQuant's are not built.
NEVER_WRITTEN = ("FP8_PB_WO", "NVFP4_AWQ", "W4A16_AWQ", "W4A8_AWQ", "NVFP4_SVD")
COMPRESSED_TENSORS: dict[str, Takers] = {
    "FP8": _takers(VLLM, SGLANG, TRANSFORMERS),
    "FP8A16": _takers(VLLM, SGLANG, TRANSFORMERS),
    "FP8_DYNAMIC": _takers(*ALL),
    "FP8A16 by channel": _takers(VLLM, SGLANG, TRANSFORMERS),
    "FP8A16 in blocks": _takers(VLLM, transformers="dense"),
    "W8A8": _takers(VLLM, sglang="dense", transformers="dense"),
    "W8A8 static": _takers(VLLM, sglang="dense", transformers="dense"),
    "W8A16": _takers(VLLM, SGLANG, TRANSFORMERS),
    "W4A16": _takers(VLLM, SGLANG, TRANSFORMERS),
    "NVFP4": _takers(VLLM, SGLANG, TRTLLM, transformers="dense"),
    "NVFP4A16": _takers(VLLM, SGLANG, transformers="dense"),
    "MXFP4": _takers(VLLM, TRANSFORMERS, sglang="experts"),
    "MXFP4A16": _takers(VLLM, TRANSFORMERS, sglang="experts"),
    "MXFP8": _takers(VLLM, transformers="dense"),
    "MXFP8A16": _takers(VLLM, transformers="dense"),
}
SUPPORT: dict[str, dict[str, Takers]] = {
    "modelopt": {algo: _takers(*servers) for algo, servers in ALGO_SUPPORT.items() if algo not in NEVER_WRITTEN},
    "compressed-tensors": COMPRESSED_TENSORS,
    "fp8": {"block-FP8": _takers(*ALL)},
    "fakequant": {"every format": _takers(*ALL)},
}


def list_support() -> list[tuple[str, str]]:
    """(layout and format, who takes it) for each line of the table."""
    return [
        (f"{layout}: {title}", told(takers)) for layout, formats in SUPPORT.items() for title, takers in formats.items()
    ]


def told(takers: Takers) -> str:
    """The servers in words."""
    return ", ".join(f"{server} ({part})" if part else server for server, part in takers.items()) or "no server"


def narrowed(titles: Iterable[tuple[str, bool]], layout: str) -> list[str]:
    """What is not taken by everybody; `titles`: formats of the layout, and whether routed experts have it."""
    found = []
    for title, is_of_experts in sorted(set(titles)):
        refused = "dense" if is_of_experts else "experts"
        takers = [server for server, part in SUPPORT[layout][title].items() if part != refused]
        others = [server for server in ALL if server not in takers]
        of = f"{title} {'experts' if is_of_experts else 'layers'} in {layout}"
        if not takers:
            found.append(f"no server takes {of}")
        elif others:
            found.append(f"{of} are taken by {' and '.join(takers)}, not by {' or '.join(others)}")
    return found
