"""What each server makes of an exclude list, rule by rule, and the lists that we write."""

from __future__ import annotations

import random

import pytest

from hf_ptq.export.servers import (
    ALGO_SUPPORT,
    SERVERS,
    ExcludeList,
    ServedModule,
    exclude_entries,
    exclusion_problems,
    served_modules,
    sglang_excludes,
    support_warnings,
    trtllm_2026_excludes,
    trtllm_excludes,
    vllm_excludes,
)

MATCHERS = (vllm_excludes, sglang_excludes, trtllm_excludes, trtllm_2026_excludes)
L1 = "model.layers.1."


def module(name: str, *leaves: str) -> ServedModule:
    parent = name.rpartition(".")[0]
    return ServedModule(name, tuple(f"{parent}.{leaf}" for leaf in leaves) or (name,), name.endswith(".experts"))


O_PROJ = module(L1 + "self_attn.o_proj")
QKV = module(L1 + "self_attn.qkv_proj", "q_proj", "k_proj", "v_proj")
EXPERTS = module(L1 + "mlp.experts", "experts.0.up_proj", "experts.1.up_proj")
SHARED = module(L1 + "mlp.shared_experts.down_proj")
ATTENTION = L1 + "self_attn"
QKV_NAMES = [f"{ATTENTION}.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj")]

# module, entries, and the verdicts of vLLM, SGLang, TensorRT-LLM before 2026, TensorRT-LLM of 2026
CASES = [
    (O_PROJ, [], (False, False, False, False)),
    (O_PROJ, ["lm_head"], (False, False, False, False)),
    (O_PROJ, [L1 + "self_attn.o_proj"], (True, True, True, True)),
    (O_PROJ, ["model.layers.1.self_attn.o"], (True, False, False, False)),  # vLLM: substring
    (module("model.layers.10.mlp.down_proj"), ["model.layers.1"], (True, False, False, False)),
    (module("model.layers.1.mlp.down_proj"), ["model.layers.1"], (True, True, False, True)),  # path, ancestor
    (O_PROJ, [ATTENTION], (True, True, False, True)),
    (O_PROJ, [ATTENTION + "*"], (True, True, True, True)),
    (O_PROJ, [ATTENTION + ".*"], (True, True, True, True)),
    (module(ATTENTION), [ATTENTION + ".*"], (False, False, False, True)),  # 2026: X.* is X
    (O_PROJ, ["self_attn"], (True, True, False, False)),
    (O_PROJ, ["self_a*"], (False, True, False, False)),  # SGLang: a glob against each part
    (O_PROJ, ["*o_proj"], (True, True, True, True)),
    (O_PROJ, ["re:.*o_proj"], (False, False, False, False)),
    (O_PROJ, ["self_attn.o_proj."], (False, True, False, False)),  # SGLang: a dot at the end is nothing
    (QKV, QKV_NAMES, (True, True, True, True)),
    (QKV, QKV_NAMES[:1], (None, None, True, True)),
    (QKV, ["*q_proj*"], (False, False, True, True)),  # vLLM and SGLang ask about qkv_proj
    (QKV, ["*self_attn*"], (True, True, True, True)),
    (QKV, [ATTENTION + ".qkv_proj"], (True, True, True, True)),
    (EXPERTS, [L1 + "mlp.experts"], (True, True, True, True)),
    (EXPERTS, [L1 + "mlp.experts*"], (True, True, True, True)),
    (EXPERTS, [L1 + "mlp.experts.0.up_proj"], (True, False, False, False)),  # vLLM: one expert is all
    (EXPERTS, [L1 + "mlp"], (True, False, False, True)),  # SGLang: no path rule for experts
    (SHARED, [L1 + "mlp.shared_experts.down_proj.weight"], (True, True, False, False)),
    (module("vision_tower.blocks.0.fc1"), [], (True, False, False, False)),
    (module("language_model.model.layers.0.fc1"), ["model.layers.0.fc1"], (True, True, False, False)),
    (module("language_model.model.layers.0.fc1"), ["model.*.fc1"], (False, True, False, False)),
    (module("language_model.lm_head"), ["lm_*"], (False, True, False, False)),
    (module("model.layers.7.self_attn.q_b_proj"), ["model.layers.0.self_attn.q_b_proj"], (False, True, False, False)),
]


@pytest.mark.parametrize(("served", "entries", "verdicts"), CASES)
def test_rules_of_the_servers(served, entries, verdicts):
    listed = ExcludeList(entries)
    assert tuple(matcher(served, listed) for matcher in MATCHERS) == verdicts


def test_served_modules_merge_what_servers_merge():
    names = [
        *("a.q_proj", "a.k_proj", "a.v_proj", "b.q_proj", "b.k_proj"),  # b lacks one: stays single
        *("m.experts.0.gate_proj", "m.experts.0.up_proj", "m.experts.10.gate_proj"),
        *("m.gate_proj", "m.up_proj", "lm_head"),
    ]
    found = {m.name: (m.linears, m.is_experts) for m in served_modules(names)}
    assert found == {
        "a.qkv_proj": (("a.q_proj", "a.k_proj", "a.v_proj"), False),
        "b.q_proj": (("b.q_proj",), False),
        "b.k_proj": (("b.k_proj",), False),
        "m.experts": (("m.experts.0.gate_proj", "m.experts.0.up_proj", "m.experts.10.gate_proj"), True),
        "m.gate_up_proj": (("m.gate_proj", "m.up_proj"), False),
        "lm_head": (("lm_head",), False),
    }


def layer(number: int, moe: bool) -> list[str]:
    root = f"model.layers.{number}"
    names = [f"{root}.self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj")]
    ways = [f"mlp.experts.{e}" for e in range(3)] + ["mlp.shared_experts"] if moe else ["mlp"]
    names += [f"{root}.{way}.{leaf}" for way in ways for leaf in ("gate_proj", "up_proj", "down_proj")]
    return [*names, f"{root}.mlp.gate"] if moe else names


def test_our_lists_say_to_every_server_what_is_quantized():
    linears = ["lm_head", *(name for number in range(12) for name in layer(number, moe=number > 0))]
    modules = served_modules(linears)
    for seed in range(60):
        rng = random.Random(seed)
        quantized = [name for m in modules if rng.random() < 0.6 for name in m.linears]
        rest = [name for name in linears if name not in quantized]
        entries = exclude_entries(quantized, rest)
        assert exclusion_problems(quantized, rest, entries) == []
        assert list(entries) == sorted(set(entries))


def test_entries_of_a_list():
    quantized = [*layer(1, moe=True)[4:-1], *layer(0, moe=False)]
    rest = [*layer(1, moe=True)[:4], L1 + "mlp.gate", *layer(2, moe=True), "lm_head"]
    dense = ["self_attn.k_proj", "self_attn.o_proj", "self_attn.q_proj", "self_attn.v_proj"]
    shared = [f"mlp.shared_experts.{leaf}_proj" for leaf in ("down", "gate", "up")]
    assert exclude_entries(quantized, rest) == (
        "lm_head", L1 + "mlp.gate", *(L1 + leaf for leaf in dense),
        *("model.layers.2." + leaf for leaf in ["mlp.experts*", "mlp.gate", *shared, *dense]),
    )  # fmt: skip


def test_a_name_inside_a_quantized_name_gets_a_star_in_front():
    quantized, rest = ["m.mlp.gate_proj", "m.mlp.up_proj"], ["m.mlp.gate"]
    assert exclude_entries(quantized, rest) == ("*m.mlp.gate",)
    assert exclusion_problems(quantized, rest, ["*m.mlp.gate"]) == []
    (problem,) = exclusion_problems(quantized, rest, ["m.mlp.gate"])
    assert problem == "m.mlp.gate_up_proj: is quantized but excluded for vLLM"


def test_problems_name_module_and_servers():
    linears = layer(1, moe=True)
    attention, experts = linears[:4], [name for name in linears if ".experts." in name]
    assert exclusion_problems([], attention[3:], []) == [
        f"{ATTENTION}.o_proj: is not quantized and not excluded for "
        "vLLM, SGLang, TensorRT-LLM before 2026, TensorRT-LLM"
    ]
    assert exclusion_problems([], attention[3:], [], mixed=True) == []
    assert exclusion_problems(experts, [], [experts[0]]) == [f"{L1}mlp.experts: is quantized but excluded for vLLM"]
    assert exclusion_problems(attention[3:], [], [ATTENTION], mixed=True) == [
        f"{ATTENTION}.o_proj: is quantized but excluded for vLLM, SGLang, TensorRT-LLM"
    ]
    assert exclusion_problems(attention[:1], attention[1:3], []) == [
        f"{ATTENTION}.qkv_proj: 1 of its 3 linears are quantized, servers know all or none"
    ]
    assert exclusion_problems([], attention[:3], [attention[0], "re:x"]) == [
        "exclude entry 're:x': no server reads regular expressions in this layout",
        f"{ATTENTION}.qkv_proj: some but not all of {', '.join(attention[:3])} are excluded, "
        "vLLM and SGLang will raise",
    ]


def test_one_layers_latent_projection_speaks_for_all_in_sglang():
    quantized, rest = ["model.layers.1.self_attn.kv_b_proj"], ["model.layers.0.self_attn.kv_b_proj"]
    (problem,) = exclusion_problems(quantized, rest, exclude_entries(quantized, rest))
    assert problem == "model.layers.1.self_attn.kv_b_proj: is quantized but excluded for SGLang"


def test_support():
    assert support_warnings(["FP8"], ["FP8"]) == []
    assert support_warnings(["NVFP4", "FP8"]) == []
    assert support_warnings(["W8A16"]) == ["W8A16 is taken by TensorRT-LLM, not by vLLM or SGLang"]
    assert support_warnings(["MXFP4"]) == support_warnings(["MXFP4"], ["MXFP4"]) == ["no server takes MXFP4"]
    assert support_warnings(["FP8_PER_CHANNEL_PER_TOKEN"], ["FP8_PER_CHANNEL_PER_TOKEN"]) == [
        "FP8_PER_CHANNEL_PER_TOKEN is taken by vLLM and TensorRT-LLM, not by SGLang",
        "vLLM loads experts of FP8_PER_CHANNEL_PER_TOKEN as static per-tensor FP8",
    ]
    (warning,) = support_warnings(["FP8", "MXFP8"])
    assert warning == "SGLang takes MIXED_PRECISION without an NVFP4 layer for another format"
    assert all(set(servers) <= set(SERVERS) for servers in ALGO_SUPPORT.values())
