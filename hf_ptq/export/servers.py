"""How vLLM, SGLang and TensorRT-LLM read an exclude list, and which algorithms each takes.

A server does not ask about `q_proj`. It asks about its own module, which may be several linears of the checkpoint
merged (`qkv_proj`) or all routed experts of a layer, and each has its own way of asking:

    vLLM          exact names, where all members of a merged module are listed or none (else it raises); then any
                  entry that is a SUBSTRING of the module's name; then globs against the whole name. For experts, an
                  entry that contains the module's name is enough: one expert listed leaves the whole layer out.
    SGLang        entries that are a run of whole dotted parts of the name, again all members or none; then globs,
                  against the whole name and against each dotted part alone.
    TensorRT-LLM  globs against the whole name, of a merged module and of its members. Releases of 2026 also try the
                  ancestors of the name, and take `X.*` for X.

`exclude_entries` writes a list that all of them read alike, `exclusion_problems` proves it for a given export. This
file knows names only; whether a linear really is quantized is for the caller to say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fnmatch import translate

from hf_ptq.quantization.groups import fused_groups

EXPERT = re.compile(r"(.*\.experts)\.\d+\..+")
REGEX_PREFIX = "re:"  # read by compressed-tensors' loaders and by no release of the three in this layout
VLLM_NEVER_QUANTIZES = ("vision_tower", "vision_model", "vit_large_projector")
# SGLang compares only the leaf of these, so one entry speaks for every layer of the model.
SGLANG_BY_LEAF = frozenset({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"})

VLLM, SGLANG, TRTLLM = "vLLM", "SGLang", "TensorRT-LLM"
SERVERS = (VLLM, SGLANG, TRTLLM)
ALGO_SUPPORT: dict[str, tuple[str, ...]] = {
    "FP8": SERVERS,
    "FP8_PER_CHANNEL_PER_TOKEN": (VLLM, TRTLLM),
    "FP8_PB_WO": (VLLM,),
    "fp8_pb_wo": (VLLM, TRTLLM),  # TensorRT-LLM knows the lower case only, vLLM compares in upper case
    "NVFP4": SERVERS,
    "NVFP4_AWQ": (SGLANG, TRTLLM),
    "W4A16_NVFP4": SERVERS,
    "W4A16_NVFP4 in groups of 32": (),  # the kernels of all three have groups of 16
    "MXFP8": SERVERS,
    "W4A16_AWQ": (TRTLLM,),
    "W4A8_AWQ": (TRTLLM,),
    "W4A8_NVFP4_FP8": (TRTLLM,),
    "W4A8_MXFP4_FP8": (TRTLLM,),
    "W8A16": (TRTLLM,),
    "W8A8_SQ_PER_CHANNEL": (TRTLLM,),
    "W4A16": (),
    "W4A8": (),
    "W4A16_MXFP4": (),
    "MXFP4": (),
    "MXFP6": (),
    "MXINT8": (),
    "NVFP4_SVD": (),
    "MIXED_PRECISION": SERVERS,
}
# vLLM loads experts of these as static per-tensor FP8.
PER_TENSOR_EXPERTS = ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "fp8_pb_wo")

WITHOUT_NVFP4 = "SGLang takes MIXED_PRECISION without an NVFP4 layer for another format"

Verdict = bool | None  # excluded, not excluded, or None: the server raises


@dataclass(frozen=True)
class ServedModule:
    """One module as servers build it; `linears` are the checkpoint's that it is made of."""

    name: str
    linears: tuple[str, ...]
    is_experts: bool = False

    @property
    def is_fused(self) -> bool:
        """Several linears in one, experts apart."""
        return len(self.linears) > 1 and not self.is_experts


class ExcludeList:
    """The entries of an exclude list, sorted once into names and patterns (a list may have thousands)."""

    def __init__(self, entries: Iterable[str]) -> None:
        self.entries = tuple(dict.fromkeys(entries))
        self.names = frozenset(self.entries)
        self.globs = tuple(entry for entry in self.entries if not entry.startswith(REGEX_PREFIX))
        wild = [glob for glob in self.globs if set(glob) & set("*?[")]
        self.patterns = tuple(re.compile(translate(glob)) for glob in wild)
        # SGLang's own translation: only the dot is quoted and only the star rewritten.
        self.sglang_patterns = tuple(re.compile(glob.replace(".", r"\.").replace("*", ".*")) for glob in wild)
        self.plain = frozenset(self.globs).difference(wild)
        heads = {glob.removesuffix(".*") for glob in self.globs if glob.endswith(".*")}
        self.head_patterns = tuple(re.compile(translate(head)) for head in heads)
        self.paths = frozenset(entry.rstrip(".") for entry in self.entries)
        self.leaves = frozenset(entry.rpartition(".")[2] for entry in self.entries) & SGLANG_BY_LEAF


def served_modules(linears: Iterable[str]) -> list[ServedModule]:
    """What servers make of the checkpoint's linears (hub names): experts by layer, fused groups, the rest as it is."""
    experts: dict[str, list[str]] = {}
    dense: list[str] = []
    for name in linears:
        match = EXPERT.fullmatch(name)
        if match:
            experts.setdefault(match[1], []).append(name)
        else:
            dense.append(name)
    groups = fused_groups(dense)
    merged = {member for members in groups.values() for member in members}
    modules = [ServedModule(name, tuple(members), is_experts=True) for name, members in experts.items()]
    modules += [ServedModule(name, members) for name, members in groups.items()]
    modules += [ServedModule(name, (name,)) for name in dense if name not in merged]
    return sorted(modules, key=lambda module: module.name)


def exclude_entries(quantized: Collection[str], unquantized_linears: Collection[str]) -> tuple[str, ...]:
    """The exclude list for an export: what every server reads as exactly the unquantized linears.

    Exact hub names, because a bare parent excludes its children in vLLM and SGLang only. A layer of experts gets one
    glob, which TensorRT-LLM needs. A name that is a substring of a quantized module's name gets a star in front:
    vLLM's substring test does not read it as a pattern, every glob matcher does.
    """
    chosen = frozenset(quantized)
    modules = served_modules([*quantized, *unquantized_linears])
    kept = [module.name for module in modules if chosen.intersection(module.linears)]
    entries: list[str] = []
    for module in modules:
        if chosen.intersection(module.linears):
            continue
        if module.is_experts:
            entries.append(f"{module.name}*")
        elif module.is_fused or not any(module.name in name for name in kept):
            entries.extend(module.linears)
        else:
            entries.append(f"*{module.name}")
    return tuple(sorted(entries))


def exclusion_problems(
    quantized: Collection[str], unquantized_linears: Collection[str], excludes: Iterable[str], mixed: bool = False
) -> list[str]:
    """Each module that a server would treat otherwise than the export does, with the server's name.

    `mixed`: the config has a table of the quantized layers (MIXED_PRECISION), so that what is not in it needs no
    exclusion.
    """
    chosen, listed = frozenset(quantized), ExcludeList(excludes)
    found = [
        f"exclude entry {entry!r}: no server reads regular expressions in this layout"
        for entry in listed.entries
        if entry.startswith(REGEX_PREFIX)
    ]
    for module in served_modules([*quantized, *unquantized_linears]):
        count = sum(name in chosen for name in module.linears)
        if 0 < count < len(module.linears):
            found.append(
                f"{module.name}: {count} of its {len(module.linears)} linears are quantized, servers know all or none"
            )
        elif count or not mixed:
            found += _wrong_verdicts(module, count > 0, listed)
    return found


def support_warnings(algos: Collection[str], experts_algos: Collection[str] = ()) -> list[str]:
    """What narrows the use of an export: servers that refuse an algorithm or load it as another one.

    `algos`: of all layers; `experts_algos`: those among them that routed experts have.
    """
    found = []
    for algo in sorted(algos):
        servers = ALGO_SUPPORT.get(algo, ())
        refusing = [server for server in SERVERS if server not in servers]
        if not servers:
            found.append(f"no server takes {algo}")
        elif refusing:
            found.append(f"{algo} is taken by {' and '.join(servers)}, not by {' or '.join(refusing)}")
    if len(set(algos)) == 1:
        wrongly_loaded = sorted(set(experts_algos).intersection(PER_TENSOR_EXPERTS))
        found += [f"vLLM loads experts of {algo} as static per-tensor FP8" for algo in wrongly_loaded]
    elif not any("NVFP4" in algo for algo in algos):
        found.append(WITHOUT_NVFP4)
    return found


def vllm_excludes(module: ServedModule, listed: ExcludeList) -> Verdict:
    """vLLM 0.26 to 0.33."""
    if module.is_fused and module.name not in listed.names:
        members = {linear in listed.names for linear in module.linears}
        if len(members) > 1:
            return None
        exact = members == {True}
    elif "experts" in module.name:
        exact = any(module.name in entry for entry in listed.entries)
    else:
        exact = module.name in listed.names
    # The name without a leading "language_model." is part of the name, so the substring test covers it too.
    return (
        exact
        or any(part in module.name for part in VLLM_NEVER_QUANTIZES)
        or any(entry in module.name and entry != module.name for entry in listed.entries)
        or any(pattern.match(module.name) for pattern in listed.patterns)
    )


def sglang_excludes(module: ServedModule, listed: ExcludeList) -> Verdict:
    """SGLang 0.5.23."""
    if module.is_fused:
        members = {_on_path(linear, listed.paths) for linear in module.linears}
        if len(members) > 1:
            return None
        by_name = members == {True}
    else:
        by_name = not module.is_experts and _on_path(module.name, listed.paths)
        if not by_name and not module.is_experts and "experts" in module.name:
            by_name = any(module.name in entry for entry in listed.entries)
    full_names = {module.name, module.name.removeprefix("language_model.")}
    names = full_names.union(*(name.split(".") for name in full_names))
    leaf = module.name.rpartition(".")[2]
    return (
        by_name
        or not names.isdisjoint(listed.plain)
        or any(pattern.fullmatch(name) for pattern in listed.sglang_patterns for name in names)
        or any(tail in leaf for tail in listed.leaves)
    )


def trtllm_excludes(module: ServedModule, listed: ExcludeList) -> Verdict:
    """TensorRT-LLM before 2026: whole names only."""
    names = {module.name, *(module.linears if module.is_fused else ())}
    return not names.isdisjoint(listed.plain) or _any_match(listed.patterns, names)


def trtllm_2026_excludes(module: ServedModule, listed: ExcludeList) -> Verdict:
    """TensorRT-LLM of 2026: every ancestor of the names too, and `X.*` is also X."""
    names = {module.name, *(module.linears if module.is_fused else ())}
    names |= {".".join(parts[:k]) for parts in [name.split(".") for name in names] for k in range(1, len(parts))}
    return not names.isdisjoint(listed.plain) or _any_match((*listed.patterns, *listed.head_patterns), names)


MATCHERS: dict[str, Callable[[ServedModule, ExcludeList], Verdict]] = {
    VLLM: vllm_excludes,
    SGLANG: sglang_excludes,
    f"{TRTLLM} before 2026": trtllm_excludes,
    TRTLLM: trtllm_2026_excludes,
}


def _wrong_verdicts(module: ServedModule, is_quantized: bool, listed: ExcludeList) -> list[str]:
    """One line for all servers that read the list otherwise, one for those that would raise."""
    verdicts = {server: matcher(module, listed) for server, matcher in MATCHERS.items()}
    wrong = [server for server, verdict in verdicts.items() if verdict is is_quantized]
    raising = [server for server, verdict in verdicts.items() if verdict is None]
    what = "is quantized but excluded" if is_quantized else "is not quantized and not excluded"
    found = [f"{module.name}: {what} for {', '.join(wrong)}"] if wrong else []
    if raising:
        linears = ", ".join(module.linears)
        found.append(f"{module.name}: some but not all of {linears} are excluded, {' and '.join(raising)} will raise")
    return found


def _any_match(patterns: Iterable[re.Pattern[str]], names: Iterable[str]) -> bool:
    """True if some (anchored) pattern matches some name."""
    return any(pattern.match(name) for pattern in patterns for name in names)


def _on_path(name: str, paths: frozenset[str]) -> bool:
    """True if some entry is a run of whole dotted parts of `name`."""
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return any(".".join(parts[start:end]) in paths for end in ends for start in range(end))
