"""Both configuration files, literally."""

from __future__ import annotations

import json

import pytest

from hf_ptq.export import config_files
from hf_ptq.export.config_files import (
    LayerAlgo,
    disagreements,
    exported_config,
    json_text,
    quantization_config,
    write_json,
)

FP8 = LayerAlgo("FP8", None, 8, 8, "float")
NVFP4 = LayerAlgo("NVFP4", 16, 4, 4, "float")
W4A16 = LayerAlgo("W4A16_NVFP4", 16, 4, None, "float")
W8A16 = LayerAlgo("W8A16", None, 8, None, "int")
PER_CHANNEL = LayerAlgo("FP8_PER_CHANNEL_PER_TOKEN", None, 8, 8, "float")
MXFP8 = LayerAlgo("MXFP8", 32, 8, 8, "float")


@pytest.fixture(autouse=True)
def _version(monkeypatch):
    monkeypatch.setattr(config_files, "package_version", lambda: "1.2.3")


def test_fp8_with_an_fp8_cache():
    flat, nested = quantization_config({"b": FP8, "a": FP8}, ["lm_head", "model.x", "lm_head"], "FP8")
    assert json.dumps(flat) == json.dumps(
        {  # the order of keys counts too
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "config_groups": {
                "group_0": {
                    "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                    "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                    "targets": ["Linear"],
                }
            },
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "ignore": ["lm_head", "model.x"],
            "producer": {"name": "hf-ptq", "version": "1.2.3"},
        }
    )
    assert json.dumps(nested) == json.dumps(
        {
            "producer": {"name": "modelopt", "version": "0.47.0+hf.ptq.1.2.3"},
            "quantization": {
                "quant_algo": "FP8",
                "kv_cache_quant_algo": "FP8",
                "exclude_modules": ["lm_head", "model.x"],
            },
        }
    )


def test_nvfp4_has_group_size_at_the_top_and_inputs_in_its_group():
    flat, nested = quantization_config({"a": NVFP4}, [], None)
    assert flat["group_size"] == nested["quantization"]["group_size"] == 16
    assert flat["config_groups"]["group_0"]["input_activations"] == {
        "dynamic": False,
        "num_bits": 4,
        "type": "float",
        "group_size": 16,
    }
    assert flat["config_groups"]["group_0"]["weights"]["group_size"] == 16
    assert "kv_cache_scheme" not in flat
    assert "kv_cache_quant_algo" not in flat
    assert nested["quantization"]["kv_cache_quant_algo"] is None
    assert flat["ignore"] == nested["quantization"]["exclude_modules"] == []


def test_weight_only_nvfp4_has_no_inputs():
    flat, _ = quantization_config({"a": W4A16}, [], None)
    assert flat["config_groups"] == {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
        }
    }


@pytest.mark.parametrize("algo", [W8A16, PER_CHANNEL])
def test_algorithms_whose_readers_look_for_no_groups_have_none(algo):
    flat, nested = quantization_config({"a": algo}, ["lm_head"], None)
    assert flat["quant_algo"] == nested["quantization"]["quant_algo"] == algo.algo
    assert "config_groups" not in flat
    assert "group_size" not in flat
    assert "group_size" not in nested["quantization"]


def test_an_nvfp4_cache_is_named_where_each_server_looks():
    flat, nested = quantization_config({"a": NVFP4}, [], "NVFP4")
    assert flat["kv_cache_scheme"] == flat["kv_cache_quant_algo"] == "NVFP4"
    assert nested["quantization"]["kv_cache_quant_algo"] == "NVFP4"


def test_mixed_precision_lists_every_layer():
    flat, nested = quantization_config({"m.b": NVFP4, "m.c": FP8, "m.a": NVFP4}, ["lm_head"], "FP8")
    table = {
        "m.a": {"quant_algo": "NVFP4", "group_size": 16},
        "m.b": {"quant_algo": "NVFP4", "group_size": 16},
        "m.c": {"quant_algo": "FP8"},
    }
    assert flat["quant_algo"] == nested["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert flat["quantized_layers"] == nested["quantization"]["quantized_layers"] == table
    assert flat["quantized_layers"] is not nested["quantization"]["quantized_layers"]
    assert flat["group_size"] == nested["quantization"]["group_size"] == 16
    assert [group["targets"] for group in flat["config_groups"].values()] == [["m.a", "m.b"], ["m.c"]]
    assert [group["weights"]["num_bits"] for group in flat["config_groups"].values()] == [4, 8]


def test_mixed_precision_with_two_group_sizes_names_that_of_nvfp4():
    """SGLang reads one size at the top, for NVFP4 layers; others have theirs in the table."""
    flat, nested = quantization_config({"a": NVFP4, "b": MXFP8}, [], None)
    assert flat["group_size"] == nested["quantization"]["group_size"] == 16
    assert flat["quantized_layers"]["b"] == {"quant_algo": "MXFP8", "group_size": 32}


def test_a_table_on_request_is_mixed_precision_of_one_algorithm():
    flat, nested = quantization_config({"a": NVFP4, "b": NVFP4}, [], None, with_table=True)
    assert flat["quant_algo"] == nested["quantization"]["quant_algo"] == "MIXED_PRECISION"
    assert flat["quantized_layers"] == {key: {"quant_algo": "NVFP4", "group_size": 16} for key in "ab"}
    assert flat["config_groups"]["group_0"]["targets"] == ["a", "b"]
    assert flat["ignore"] == nested["quantization"]["exclude_modules"] == []
    assert disagreements({"quantization_config": flat}, nested) == []


def test_nothing_quantized_is_our_own_mistake():
    with pytest.raises(ValueError, match="no layer is quantized"):
        quantization_config({}, ["lm_head"], None)


def test_the_exported_config_is_the_sources_plus_one_block():
    source = {"b": 1, "dtype": "bfloat16", "torch_dtype": "bfloat16", "rope": {"theta": 1e6}, "a": None, "eps": 1e-6}
    text = json_text(source)
    flat, _ = quantization_config({"a": FP8}, [], None)
    exported = exported_config(source, flat)
    assert list(exported) == ["b", "dtype", "torch_dtype", "rope", "a", "eps", "quantization_config"]
    assert {key: exported[key] for key in source} == source
    assert exported["quantization_config"] == flat
    exported["rope"]["theta"] = 2
    assert json_text(source) == text


def test_what_a_quantized_source_said_about_itself_is_dropped():
    stale = {"quant_method": "fp8"}
    inner = {"quantization_config": stale, "x": 1}
    source = {"quantization_config": stale, "compression_config": stale, "text_config": inner}
    flat, _ = quantization_config({"a": FP8}, [], None)
    assert exported_config(source, flat) == {"text_config": {"x": 1}, "quantization_config": flat}


def test_json_files_keep_letters_and_end_with_a_newline(tmp_path):
    write_json(tmp_path / "x.json", {"ü": [1, "名"], "a": 1e-06})
    assert (tmp_path / "x.json").read_bytes() == '{\n  "ü": [\n    1,\n    "名"\n  ],\n  "a": 1e-06\n}\n'.encode()


@pytest.mark.parametrize("kv", [None, "FP8", "NVFP4"])
@pytest.mark.parametrize("algos", [[FP8], [NVFP4], [W4A16], [W8A16], [FP8, NVFP4], [NVFP4, MXFP8]])
def test_both_files_agree(algos, kv):
    layers = dict(zip("ab", algos, strict=False))
    flat, nested = quantization_config(layers, ["lm_head"], kv)
    assert disagreements(exported_config({}, flat), nested) == []


DIFFERENCES = [
    (("quantization", "quant_algo", "NVFP4"), "differ in quant_algo: 'FP8' and 'NVFP4'"),
    (("quantization", "kv_cache_quant_algo", None), "differ in the KV cache's algo: 'FP8' and None"),
    (("quantization", "group_size", 16), "differ in group_size: None and 16"),
    (("quantization", "exclude_modules", ["x"]), "differ in the excluded modules: {'lm_head'} and {'x'}"),
    (("quantization", "quantized_layers", {"x": {}}), "differ in quantized_layers: {} and {'x': {}}"),
    (("producer", "name", "hf-ptq"), "producer.name is 'hf-ptq'"),
]


@pytest.mark.parametrize(("change", "message"), DIFFERENCES)
def test_a_difference_between_the_files_is_named(change, message):
    flat, nested = quantization_config({"a": FP8}, ["lm_head"], "FP8")
    part, key, value = change
    nested[part][key] = value
    (found,) = disagreements(exported_config({}, flat), nested)
    assert message in found


def test_files_that_loaders_do_not_recognise_are_named():
    flat, nested = quantization_config({"a": NVFP4}, ["lm_head"], None)
    del flat["config_groups"]["group_0"]["input_activations"], flat["quant_method"]
    found = disagreements(exported_config({}, flat), nested)
    assert found == [
        "config.json: quant_method is None, loaders know this layout by 'modelopt'",
        "config.json: NVFP4 without input_activations in any config group is read as W4A16_NVFP4",
    ]
