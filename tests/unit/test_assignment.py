"""From a recipe and a model without weights to a decision for every linear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import save_tiny
from torch import nn

from hf_ptq.checkpoint.source import open_source
from hf_ptq.errors import UserError
from hf_ptq.model.build import build_meta_model
from hf_ptq.model.views import WeightView, weight_views
from hf_ptq.quantization.assignment import Assignment, assign
from hf_ptq.quantization.groups import fused_groups
from hf_ptq.quantization.recipe import Recipe, load_recipe
from hf_ptq.quantization.rules import Rule, numbered
from hf_ptq.report import Report

Planned = tuple[nn.Module, tuple[WeightView, ...]]
L1 = "model.layers.1"
ALL_FP8 = Rule(pattern=("*",), weight="fp8", input="fp8")


def planned(directory: Path) -> Planned:
    source = open_source(str(directory), None, False, Report(verbose=False))
    meta = build_meta_model(source)
    return meta.model, weight_views(meta.placements, source.tensors, meta.stacking)


@pytest.fixture(scope="module")
def plan(tiny: Callable[[str], Path]) -> Callable[[str], Planned]:
    """Model on meta and views of a tiny model, by name; built once each."""
    made: dict[str, Planned] = {}

    def get(name: str) -> Planned:
        if name not in made:
            made[name] = planned(tiny(name))
        return made[name]

    return get


def give(planned: Planned, *rules: Rule) -> Assignment:
    model, views = planned
    return assign(Recipe("mine", "", rules), model, views)


def schemes(assignment: Assignment) -> dict[str, tuple[str, str | None]]:
    return {module: q.scheme for module, q in assignment.by_module.items()}


def reasons(assignment: Assignment) -> dict[str, str]:
    return {left.module: left.reason for left in assignment.left_alone}


def refusal(planned: Planned, *rules: Rule) -> str:
    with pytest.raises(UserError) as caught:
        give(planned, *rules)
    return str(caught.value)


# ---- which rule decides


def test_the_last_rule_that_matches_decides(plan: Callable[[str], Planned]) -> None:
    found = give(
        plan("llama"),
        Rule(pattern=("*.mlp.*",), weight="nvfp4", input="nvfp4"),
        Rule(pattern=("*.down_proj",), weight="fp8", input="fp8"),
        Rule(pattern=(f"{L1}.*",), enable=False),
        Rule(pattern=(f"{L1}.mlp.down_proj",), weight="int8_per_channel"),
    )
    chosen, why = schemes(found), reasons(found)
    assert chosen["model.layers.0.mlp.up_proj"] == ("nvfp4", "nvfp4")
    assert chosen["model.layers.0.mlp.down_proj"] == ("fp8", "fp8")
    assert chosen[f"{L1}.mlp.down_proj"] == ("int8_per_channel", None)
    assert why[f"{L1}.mlp.up_proj"] == f"off by {L1}.*"
    assert why["model.layers.0.self_attn.q_proj"] == "no rule matches"
    assert len(chosen) == 7
    assert chosen.keys().isdisjoint(why)
    assert {q.rule for q in found.quantized} == {"*.mlp.*", "*.down_proj", f"{L1}.mlp.down_proj"}


def test_off_and_on_again(plan: Callable[[str], Planned]) -> None:
    rules = (ALL_FP8, Rule(pattern=("*",), enable=False), Rule(pattern=("*.o_proj",), weight="fp8"))
    assert schemes(give(plan("llama"), *rules)) == {
        f"model.layers.{i}.self_attn.o_proj": ("fp8", None) for i in range(3)
    }


def test_patterns_tell_case_and_take_lists(plan: Callable[[str], Planned]) -> None:
    found = give(plan("llama"), Rule(pattern=("*.O_proj", "*.0.*.down_proj", "lm_head"), weight="fp8"))
    assert set(schemes(found)) == {"model.layers.0.mlp.down_proj", "lm_head"}


def test_a_rule_for_keys_and_values_says_nothing_about_linears(plan: Callable[[str], Planned]) -> None:
    found = give(plan("llama"), ALL_FP8, Rule(pattern=("*",), k="fp8_cast", v="fp8_cast"))
    assert schemes(found)[f"{L1}.mlp.up_proj"] == ("fp8", "fp8")
    assert found.kv is not None
    assert give(plan("llama"), ALL_FP8).kv is None


def test_layers_are_counted_from_the_end_too(plan: Callable[[str], Planned]) -> None:
    ends = Rule(pattern=("*.layers.0.*", "*.layers.-1.*"), enable=False)
    for name in ("llama", "mixtral"):
        layers = {m.split(".")[2] for m in schemes(give(plan(name), Rule(pattern=("*.layers.*",), weight="fp8"), ends))}
        assert layers == {"1"}
    found = give(plan("llama"), Rule(pattern=("*.layers.-[12].*",), weight="fp8"))
    assert {m.split(".")[2] for m in schemes(found)} == {"1", "2"}
    missing = give(plan("llama"), ALL_FP8, Rule(pattern=("*.layers.-4.*",), enable=False))
    assert missing.warnings == ("recipe mine: pattern '*.layers.-4.*' matches no module",)


def test_which_patterns_can_tell_experts_apart() -> None:
    telling = ("*.experts.3.*", "*experts.[0-3]*", "*.?.w1", "*3", "1*", "*quantizers.0", "*.layers.1.*")
    alike = ("*.experts.*", "*conv1d*", "*.w1", "*.layers.-1.*", "*fc1_latent*", "*", "model.mlp.up_proj")
    rules = [Rule(pattern=pattern, enable=False) for pattern in (*telling, *alike)]
    assert [rule.pattern[0] for rule in numbered(rules)] == list(telling)


def test_parent_class_narrows_a_rule(plan: Callable[[str], Planned]) -> None:
    off = Rule(pattern=("*",), parent_class=("Embedding", "Linear"), enable=False)
    found = give(plan("llama"), ALL_FP8, off, Rule(pattern=("*.o_proj",), parent_class=("Linear",), weight="fp8"))
    assert set(schemes(found)) == {f"model.layers.{i}.self_attn.o_proj" for i in range(3)}
    assert reasons(found)["model.embed_tokens"] == "off by * in Embedding"
    assert reasons(found)["lm_head"] == "off by * in Linear"


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (Rule(pattern=("*.experts",), enable=False), "pattern '*.experts' matches only modules that hold others"),
        (Rule(pattern=("*.self_attn",), weight="nvfp4"), "what is in them matches '*.self_attn.*'"),
        (Rule(pattern=("*",), parent_class=("Linaer",), enable=False), "no module is of the class 'Linaer'"),
    ],
)
def test_a_rule_that_can_be_about_no_weight_is_told(
    model: str, rule: Rule, told: str, plan: Callable[[str], Planned]
) -> None:
    found = give(plan(model), Rule(pattern=("*_proj", "*.w?"), weight="fp8", optional=True), rule)
    assert [told in warning for warning in found.warnings] == [True]
    assert {s[0] for s in schemes(found).values()} == {"fp8"}, "it decided nothing"
    assert give(plan(model), ALL_FP8, rule.model_copy(update={"optional": True})).warnings == ()


def test_a_rule_on_keys_and_values_names_attention(plan: Callable[[str], Planned]) -> None:
    assert give(plan("llama"), ALL_FP8, Rule(pattern=("*.self_attn",), k="fp8", v="fp8")).warnings == ()


def test_parent_class_sees_base_classes() -> None:
    class Mine(nn.Linear):
        """A subclass that no table lists."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = Mine(16, 16), nn.Linear(16, 16), nn.Embedding(16, 16)

    views = tuple(WeightView((name,), f"{name}.weight", (16, 16)) for name in "abc")
    found = give((Model(), views), ALL_FP8, Rule(pattern=("*",), parent_class=("Mine",), enable=False))
    assert set(schemes(found)) == {"b"}
    assert reasons(found) == {"a": "off by * in Mine", "c": "Embedding is no kind that can be quantized"}
    found = give((Model(), views), ALL_FP8)
    assert set(schemes(found)) == {"a", "b"}, "a subclass of Linear is a Linear"


def test_what_is_no_linear_is_left_alone_by_name(plan: Callable[[str], Planned]) -> None:
    found = give(plan("qwen3_moe"), ALL_FP8)
    assert reasons(found)["model.embed_tokens"] == "Embedding is no kind that can be quantized"
    assert reasons(found)[f"{L1}.mlp.gate"].endswith("Router is no kind that can be quantized")
    assert "lm_head" in schemes(found)


def test_default_disabled(plan: Callable[[str], Planned]) -> None:
    for name, routers in (("llama", set()), ("qwen3_moe", {"gate"}), ("mixtral", {"gate"}), ("minimax_m2", {"gate"})):
        model, views = plan(name)
        left = reasons(assign(load_recipe("nvfp4"), model, views))
        assert {module.rpartition(".")[2] for module in left} == {"lm_head", "embed_tokens"} | routers


# ---- names


@pytest.mark.parametrize("pattern", ["*.block_sparse_moe.experts.*", "*.mlp.experts.*", "*.w[123]"])
def test_patterns_fit_the_sources_names_and_the_models(pattern: str, plan: Callable[[str], Planned]) -> None:
    """Mixtral's experts are called block_sparse_moe.experts.N.w1 on the hub, mlp.experts.gate_up_proj in memory."""
    chosen = schemes(give(plan("mixtral"), Rule(pattern=(pattern,), weight="fp8")))
    assert "model.layers.0.block_sparse_moe.experts.7.w1" in chosen, "stacked experts are decided together"
    assert not any("self_attn" in name for name in chosen)


@pytest.mark.parametrize("enable", [True, False])
def test_a_pattern_that_names_some_experts_of_a_layer_is_refused(enable: bool, plan: Callable[[str], Planned]) -> None:
    some = (
        Rule(pattern=("*.experts.3.*",), weight="nvfp4") if enable else Rule(pattern=("*.experts.3.*",), enable=False)
    )
    said = refusal(plan("mixtral"), ALL_FP8, some)
    assert "rules decide otherwise for model.layers.0.block_sparse_moe.experts.3.w1 than for" in said


def test_a_rule_that_is_overruled_splits_nothing(plan: Callable[[str], Planned]) -> None:
    """Nor one for another kind of module, whose pattern would fit the name of an expert."""
    attention = Rule(pattern=("*.1.*",), parent_class=("MixtralAttention",), weight="nvfp4")
    found = give(plan("mixtral"), Rule(pattern=("*.experts.3.*",), weight="nvfp4"), ALL_FP8, attention)
    assert {s for m, s in schemes(found).items() if ".experts." in m} == {("fp8", "fp8")}


def test_one_format_for_the_experts_of_a_layer(plan: Callable[[str], Planned]) -> None:
    said = refusal(
        plan("mixtral"), Rule(pattern=("*.w1", "*.w3"), weight="nvfp4"), Rule(pattern=("*.w2",), weight="fp8")
    )
    assert "the experts of model.layers.0.block_sparse_moe.experts need one format" in said
    assert "w1: nvfp4/None" in said
    assert "w2: fp8/None" in said


# ---- groups


def test_members_of_a_fused_group_share_a_name(plan: Callable[[str], Planned]) -> None:
    group = {m: q.group for m, q in give(plan("llama"), ALL_FP8).by_module.items()}
    assert {group[f"{L1}.self_attn.{p}_proj"] for p in "qkv"} == {f"{L1}.self_attn.qkv_proj"}
    assert {group[f"{L1}.mlp.{p}_proj"] for p in ("gate", "up")} == {f"{L1}.mlp.gate_up_proj"}
    assert group[f"{L1}.mlp.down_proj"] == f"{L1}.mlp.down_proj"
    assert group["lm_head"] == "lm_head"


@pytest.mark.parametrize(
    ("model", "stack", "first", "down"),
    [
        ("mixtral", f"{L1}.block_sparse_moe.experts", {"w1": "w13", "w3": "w13"}, "w2"),
        ("qwen3_moe", f"{L1}.mlp.experts", {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}, "down_proj"),
        ("deepseek_v3", f"{L1}.mlp.experts", {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}, "down_proj"),
    ],
)
def test_experts_are_stacked_views(
    model: str, stack: str, first: dict[str, str], down: str, plan: Callable[[str], Planned]
) -> None:
    stacked = {
        q.view.leaf: q for q in give(plan(model), ALL_FP8).quantized if q.view.modules[0].startswith(f"{stack}.")
    }
    assert stacked.keys() == {*first, down}
    for leaf, q in stacked.items():
        assert q.view.modules == tuple(f"{stack}.{e}.{leaf}" for e in range(8))
        assert q.view.is_stacked
        assert q.input_key == q.group == f"{stack}.{first.get(leaf, down)}"


def test_latent_attention_has_its_group(plan: Callable[[str], Planned]) -> None:
    group = {m: q.group for m, q in give(plan("deepseek_v3"), ALL_FP8).by_module.items()}
    fused = {group[f"{L1}.self_attn.{leaf}"] for leaf in ("q_a_proj", "kv_a_proj_with_mqa")}
    assert fused == {f"{L1}.self_attn.fused_qkv_a_proj_with_mqa"}
    assert group[f"{L1}.self_attn.q_b_proj"] == f"{L1}.self_attn.q_b_proj"


@pytest.mark.parametrize(
    ("model", "rule", "named"),
    [
        ("llama", Rule(pattern=(f"{L1}.*.v_proj",), enable=False), f"{L1}.self_attn.v_proj: unquantized"),
        ("llama", Rule(pattern=(f"{L1}.*.v_proj",), weight="fp8"), f"{L1}.self_attn.v_proj: fp8/None"),
        ("llama", Rule(pattern=("*.up_proj",), weight="nvfp4"), "model.layers.0.mlp.up_proj: nvfp4/None"),
        ("mixtral", Rule(pattern=("*.w3",), enable=False), "model.layers.0.block_sparse_moe.experts.0.w3: unquantized"),
        ("deepseek_v3", Rule(pattern=("*.q_a_proj",), enable=False), "model.layers.0.self_attn.q_a_proj: unquantized"),
    ],
)
def test_a_group_that_would_be_split_is_refused(
    model: str, rule: Rule, named: str, plan: Callable[[str], Planned]
) -> None:
    said = refusal(plan(model), ALL_FP8, rule)
    assert "servers fuse these, so they need one format" in said
    assert named in said
    assert "fp8/fp8" in said


# ---- shapes


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """A llama whose down projections have 72 inputs."""
    return planned(save_tiny("llama", tmp_path_factory.mktemp("narrow") / "llama", intermediate_size=72))


def test_a_shape_that_a_format_cannot_take_is_left_alone(narrow: Planned) -> None:
    found = give(narrow, Rule(pattern=("*.layers.*",), weight="nvfp4", input="nvfp4"))
    reason = "72 inputs are no multiple of 16, as nvfp4 needs"
    downs = {f"model.layers.{i}.mlp.down_proj" for i in range(3)}
    assert {m for m, why in reasons(found).items() if why == reason} == downs
    (warning,) = found.warnings
    assert warning.startswith(f"3 modules (model.layers.0.mlp.down_proj ...) are left unquantized: {reason}; a last")
    assert "such as fp8, or turn them off (enable: false)" in warning
    assert schemes(found)[f"{L1}.mlp.up_proj"] == ("nvfp4", "nvfp4"), "72 outputs are no matter"
    assert give(narrow, ALL_FP8).warnings == (), "other formats take any shape"


def test_a_shape_alone_can_leave_nothing(narrow: Planned) -> None:
    said = refusal(narrow, Rule(pattern=("*.down_proj",), weight="nvfp4"))
    assert "recipe mine quantizes nothing in LlamaForCausalLM" in said
    assert "72 inputs are no multiple of 16" in said


def test_an_odd_number_of_rows_is_left_alone_where_two_share_bytes(tmp_path: Path) -> None:
    odd = planned(save_tiny("llama", tmp_path / "odd", intermediate_size=97))
    found = give(odd, Rule(pattern=("*.mlp.*", "*.o_proj"), weight="int4_block32"))
    why = reasons(found)
    assert why[f"{L1}.mlp.up_proj"] == "97 outputs are no multiple of 2, as int4_block32 needs"
    assert why[f"{L1}.mlp.down_proj"] == "97 inputs are no multiple of 32, as int4_block32 needs"
    assert schemes(found)[f"{L1}.self_attn.o_proj"] == ("int4_block32", None)
    kinds = ("gate_proj ...) are left unquantized: 97 outputs", "up_proj ...) are left unquantized: 97 outputs")
    kinds = (*kinds, "down_proj ...) are left unquantized: 97 inputs")
    assert len(found.warnings) == len(kinds)
    for kind in kinds:
        assert any(w.startswith(f"3 modules (model.layers.0.mlp.{kind}") for w in found.warnings)


# ---- what matches nothing


def test_a_pattern_that_matches_nothing_is_a_warning(plan: Callable[[str], Planned]) -> None:
    found = give(
        plan("llama"),
        Rule(pattern=("*mlp*", "*expertz*"), weight="fp8"),
        Rule(pattern=("*router*",), enable=False, optional=True),
        Rule(pattern=("*visual*",), enable=False),
        Rule(pattern=("model.layers.1.self_attn",), enable=False),
    )
    assert found.warnings == (
        "recipe mine: pattern '*expertz*' matches no module",
        "recipe mine: pattern '*visual*' matches no module",
        "recipe mine: pattern 'model.layers.1.self_attn' matches only modules that hold others; "
        "what is in them matches 'model.layers.1.self_attn.*'",
    )


def test_a_recipe_that_quantizes_nothing_is_refused(plan: Callable[[str], Planned]) -> None:
    said = refusal(plan("llama"), Rule(pattern=("*expertz*",), weight="fp8"))
    assert "recipe mine quantizes nothing in LlamaForCausalLM" in said
    assert "no rule matches" in said
    assert "model.layers.0.mlp.down_proj" in said
    said = refusal(plan("llama"), ALL_FP8, Rule(pattern=("*.layers.*", "lm_head"), enable=False))
    assert "off by *.layers.*" in said


# ---- data


@pytest.mark.parametrize(
    ("rule", "needs_data"),
    [
        (ALL_FP8, True),
        (Rule(pattern=("*",), weight="nvfp4", input="nvfp4"), True),
        (Rule(pattern=("*",), weight="nvfp4"), False),
        (Rule(pattern=("*",), weight="fp8_per_channel", input="fp8_per_token"), False),
        (Rule(pattern=("*",), weight="int8_per_channel"), False),
    ],
)
def test_what_needs_data(rule: Rule, needs_data: bool, plan: Callable[[str], Planned]) -> None:
    cast = Rule(pattern=("*",), k="fp8_cast", v="fp8_cast")
    assert give(plan("llama"), rule, cast).needs_data is needs_data


def test_groups_come_in_the_order_of_their_modules() -> None:
    """Not in that of a set of strings, which differs from process to process."""
    names = [f"model.layers.{i}.mlp.{leaf}" for i in range(40) for leaf in ("up_proj", "gate_proj")]
    assert list(fused_groups(names)) == [f"model.layers.{i}.mlp.gate_up_proj" for i in range(40)]
