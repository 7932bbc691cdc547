"""Layouts as pure functions: packed words, what each can hold, the configuration of mixed recipes, the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import save_tiny

from hf_ptq.checkpoint.source import open_source
from hf_ptq.config import EXPORT_FORMATS
from hf_ptq.errors import UserError
from hf_ptq.export.layout import ALGOS, served_name
from hf_ptq.export.layouts import LAYOUTS, refuse_inexpressible
from hf_ptq.export.layouts.compressed_tensors import GROUPS
from hf_ptq.export.layouts.layout import Contents
from hf_ptq.export.layouts.packing import codes_to_words, words_to_codes
from hf_ptq.export.support import SUPPORT, list_support, narrowed
from hf_ptq.model.build import build_meta_model
from hf_ptq.model.views import weight_views
from hf_ptq.quantization.assignment import assign
from hf_ptq.quantization.formats import codecs, encode
from hf_ptq.quantization.formats.description import FORMATS
from hf_ptq.quantization.formats.ranges import Ranges, weight_amax
from hf_ptq.quantization.recipe import load_recipe
from hf_ptq.report import Report

CT = LAYOUTS["compressed-tensors"]


def test_words_by_hand() -> None:
    codes = torch.tensor([[-8, 7, 0, 1, -1, 2, 3, -4]], dtype=torch.int8)
    nibbles = (0, 15, 8, 9, 7, 10, 11, 4)
    word = sum(nibble << (4 * place) for place, nibble in enumerate(nibbles))
    assert codes_to_words(codes, 4).tolist() == [[word]]
    eights = torch.tensor([[-128, 127, 0, -1]], dtype=torch.int8)
    word = 0 | 255 << 8 | 128 << 16 | 127 << 24
    assert codes_to_words(eights, 8).tolist() == [[word]]


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_every_code(bits: int) -> None:
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 5, 64), dtype=torch.int8)
    words = codes_to_words(codes, bits)
    assert (words.dtype, words.shape) == (torch.int32, (3, 5, 64 * bits // 32))
    assert torch.equal(words_to_codes(words, bits), codes)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_what_is_stored_is_what_was_planned_and_decodes_to_what_the_codec_meant(layout: str) -> None:
    """For every weight format that the layout takes, for one matrix and for a stack."""
    taken = 0
    for name, number_format in FORMATS.items():
        schemes = [(name, inputs) for inputs in (None, *FORMATS)] if "weight" in number_format.roles else []
        storages = [s for scheme in schemes if (s := LAYOUTS[layout].storage(scheme)) is not None]
        for storage in storages[:1]:
            taken += 1
            for shape in ((256, 128), (3, 256, 128)):
                weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
                encoded = encode(number_format, weight, Ranges(weight_amax(weight, number_format)))
                meant = codecs()[name].decode(encoded)
                stored = storage.store(encoded, shape, torch.bfloat16)
                planned = storage.layout(shape, torch.bfloat16)
                assert {n: (t.dtype, tuple(t.shape)) for n, t in stored.items()} == planned
                assert set(storage.scales) <= planned.keys()
                decoded = storage.decode(stored)
                expected = meant.bfloat16().float() if storage.rounds_to_source else meant
                torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=0)
    assert taken >= {"modelopt": 14, "compressed-tensors": 11, "fp8": 1, "fakequant": 17}[layout]


def test_the_names_of_the_option_are_those_of_the_registry() -> None:
    assert tuple(LAYOUTS) == EXPORT_FORMATS


MIXED = Contents(
    {
        "m.0.self_attn.q_proj": ("fp8", "fp8"),
        "m.0.self_attn.k_proj": ("fp8", "fp8"),
        "m.0.self_attn.v_proj": ("fp8", "fp8"),
        "m.0.mlp.down_proj": ("nvfp4", "nvfp4"),
    },
    ("lm_head", "m.0.mlp.gate"),
    ("fp8_cast", "fp8_cast"),
)


def test_a_mixed_recipe_in_compressed_tensors() -> None:
    refuse_inexpressible(CT, MIXED)
    block, nested = CT.describe(MIXED)
    assert nested is None
    assert block is not None
    assert block["format"] == "mixed-precision"
    groups = block["config_groups"]
    assert groups["group_0"]["targets"] == ["m.0.mlp.down_proj"]
    assert groups["group_0"]["format"] == "nvfp4-pack-quantized"
    assert groups["group_0"]["input_activations"]["dynamic"] == "local"
    assert groups["group_1"]["targets"] == [f"m.0.self_attn.{leaf}_proj" for leaf in "kqv"]
    assert groups["group_1"]["weights"]["strategy"] == "tensor"
    assert block["ignore"] == ["lm_head", "m.0.mlp.gate"]
    assert block["kv_cache_scheme"]["num_bits"] == 8
    assert not list(CT.disagreements({"quantization_config": block}, {}, MIXED))


@pytest.mark.parametrize("damage", ["ignore", "target", "strategy"])
def test_a_configuration_that_says_otherwise_is_told(damage: str) -> None:
    block, _ = CT.describe(MIXED)
    assert block is not None
    if damage == "ignore":
        block["ignore"].append("m.0.self_attn.q_proj")
    elif damage == "target":
        block["config_groups"]["group_1"]["targets"].remove("m.0.self_attn.q_proj")
    else:
        block["config_groups"]["group_1"]["weights"]["strategy"] = "channel"
    problems = list(CT.disagreements({"quantization_config": block}, {}, MIXED))
    assert problems
    assert all("self_attn" in problem for problem in problems)


def test_a_fused_group_that_is_split_is_refused() -> None:
    split = Contents({"m.q_proj": ("fp8", "fp8"), "m.k_proj": ("fp8", "fp8")}, ("m.v_proj",))
    with pytest.raises(UserError, match=r"m\.qkv_proj: its 3 linears are not quantized alike"):
        refuse_inexpressible(CT, split)


def test_names_that_begin_others_are_refused_in_block_fp8() -> None:
    """transformers matches names of modules that stay as they are by their beginnings."""
    contents = Contents({"m.mlp.gate_proj": ("fp8_2d", None), "m.mlp.up_proj": ("fp8_2d", None)}, ("m.mlp.gate",))
    with pytest.raises(UserError, match=r"m\.mlp\.gate stays unquantized.*leaves m\.mlp\.gate_proj out"):
        refuse_inexpressible(LAYOUTS["fp8"], contents)


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        ({"m.q_proj": (256, 128), "m.k_proj": (128, 128), "m.v_proj": (192, 128), "m.o_proj": (100, 128)}, None),
        ({"m.q_proj": (256, 128), "m.k_proj": (64, 128), "m.v_proj": (64, 128)}, "m.k_proj has 64"),
        ({"m.gate_proj": (320, 128), "m.up_proj": (320, 128)}, "m.gate_proj has 320"),
        ({f"m.experts.{e}.{leaf}": (192, 128) for e in (0, 1) for leaf in ("w1", "w3")}, "m.experts.0.w1 ... has 192"),
        ({"m.experts.0.w1": (128, 128), "m.experts.0.w3": (192, 128)}, "m.experts.0.w3 has 192"),
        ({"m.experts.0.w1": (128, 128), "m.experts.0.w3": (128, 128), "m.experts.0.w2": (256, 128)}, None),
    ],
)
def test_outputs_that_vllm_and_sglang_cannot_merge_in_block_fp8(shapes: dict, told: str | None) -> None:
    """The last linear of a merged module may end within a block, the others not; nor may any of experts."""
    contents = Contents(dict.fromkeys(shapes, ("fp8_2d", None)), (), shapes=shapes)
    found = [line for line in LAYOUTS["fp8"].warnings(contents) if "128 x 128" in line]
    assert found == [] if told is None else len(found) == 1
    if told is not None:
        assert found[0].startswith(
            f"{told} outputs, which are no whole number of blocks of 128 x 128: vLLM and SGLang "
        )
        assert found[0].endswith("refuse to load it; leave such linears out by a rule (enable: false)")


def test_a_run_tells_of_outputs_that_cannot_be_merged(tmp_path: Path, quantize: Callable) -> None:
    report = Report(verbose=False)
    wide = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 64, "num_attention_heads": 4}
    source = save_tiny("llama", tmp_path / "ragged", **wide, num_key_value_heads=1)
    rules = '  - {pattern: ["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"], weight: fp8_2d}\n'
    path = tmp_path / "mine.yaml"
    path.write_text(f"rules:\n{rules}kv_cache: none\n")
    quantize(source, recipe=str(path), export_fmt="fp8", dry_run=True, report=report)
    found = [line.partition(",")[0] for line in report.warnings if "128 x 128" in line]
    layer = "model.layers.0"
    assert found == [f"{layer}.mlp.gate_proj ... has 320 outputs", f"{layer}.self_attn.k_proj ... has 64 outputs"]


def test_the_table_of_who_takes_what() -> None:
    assert {group.title for group in GROUPS.values()} == SUPPORT["compressed-tensors"].keys()
    assert {*map(served_name, ALGOS.values()), "MIXED_PRECISION"} == SUPPORT["modelopt"].keys(), "what is written"
    table = dict(list_support())
    assert table["compressed-tensors: FP8_DYNAMIC"] == "vLLM, SGLang, TensorRT-LLM, transformers"
    assert table["modelopt: MXFP4"] == "no server"
    assert narrowed([("FP8_DYNAMIC", True)], "compressed-tensors") == []
    assert narrowed([("MXFP8", True)], "compressed-tensors") == [
        "MXFP8 experts in compressed-tensors are taken by vLLM, not by SGLang or TensorRT-LLM or transformers"
    ]


# ---- uncommon weights


def assigned(directory: Path, recipe: Path) -> tuple[str, ...]:
    source = open_source(str(directory), None, False, Report(verbose=False))
    meta = build_meta_model(source)
    views = weight_views(meta.placements, source.tensors, meta.stacking, meta.fused)
    return assign(load_recipe(str(recipe)), meta.model, views, dict(meta.model.all_tied_weights_keys)).warnings


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[[str], Path]:
    def write(pattern: str) -> Path:
        path = tmp_path / "recipe.yaml"
        rules = [f'{{pattern: "{p}", weight: fp8, input: fp8}}' for p in ("*_proj", pattern)]
        path.write_text("rules:\n" + "".join(f"  - {rule}\n" for rule in rules) + "algorithm: max\n")
        return path

    return write


def test_a_tied_head_that_is_asked_for_by_name_is_refused(tiny: Callable, recipe: Callable) -> None:
    with pytest.raises(UserError, match=r"(?s)lm_head shares its weight with model.embed_tokens.weight.*enable: false"):
        assigned(tiny("llama_tied"), recipe("*lm_head*"))


def test_a_tied_head_under_a_star_is_left_alone_and_told(tiny: Callable, recipe: Callable) -> None:
    warnings = assigned(tiny("llama_tied"), recipe("*"))
    assert any(warning.startswith("lm_head shares the embedding's weight") for warning in warnings)


def test_an_embedding_is_left_alone_and_told(tiny: Callable, recipe: Callable) -> None:
    (warning,) = assigned(tiny("llama"), recipe("*embed_tokens*"))
    assert warning.startswith("1 Embedding modules (model.embed_tokens) are left unquantized, though the recipe asks")
