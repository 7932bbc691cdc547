"""Every flag of ModelOpt's hf_ptq.py is known here: it does what it says there, or one line says what to use."""

from __future__ import annotations

import pytest

from hf_ptq import cli
from hf_ptq.config import EXPORT_FORMATS, RunConfig
from hf_ptq.errors import UserError

# hf_ptq.py of Model Optimizer 0.47 (facts, section 8), and those of its automatic search.
FLAGS_OF_MODELOPT = """
--pyt_ckpt_path --model --recipe --device --qformat --batch_size --calib_size --calib_seq --export_path --dataset
--specdec_offline_dataset --calib_with_images --inference_tensor_parallel --inference_pipeline_parallel --awq_block_size
--sparsity_fmt --kv_cache_qformat --export_fmt --trust_remote_code --gpu_max_mem_percentage --use_seq_device_map
--use_fsdp2 --cpu_offload --verbose --no-verbose --skip_generate --low_memory_mode --attn_implementation
--auto_quantize_checkpoint --moe_calib_experts_ratio --vllm_fakequant_export --cast_mxfp4_to_nvfp4 --offload_folder
--max_cpu_memory_gb --max_gpu_memory_gb --mlflow --mlflow_experiment --mlflow_run_name
--auto_quantize_bits --auto_quantize_method --auto_quantize_score_size --auto_quantize_cost_model
"""


def test_no_flag_is_unknown() -> None:
    built = {name for param in cli._command().params for name in (*param.opts, *param.secondary_opts)}
    known = set(FLAGS_OF_MODELOPT.split())
    assert known - built == set(cli.NOT_BUILT), "supported, or refused by name"
    assert built.isdisjoint(cli.NOT_BUILT)


@pytest.mark.parametrize("flag", sorted(cli.NOT_BUILT))
def test_what_is_refused_is_one_line_with_a_cure(flag: str) -> None:
    with pytest.raises(UserError) as caught:
        cli._read(["--model", "m", flag, "1"])
    (problem,) = caught.value.problems
    assert str(problem) == f"{flag} (a flag of ModelOpt's hf_ptq.py) is not built: {cli.NOT_BUILT[flag]}"


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        ([], "modelopt"),
        (["--export_fmt", "hf"], "modelopt"),
        (["--export-fmt", "compressed_tensors"], "compressed-tensors"),
        (["--export_fmt", "fp8"], "fp8"),
        (["--vllm_fakequant_export"], "fakequant"),
        (["--vllm_fakequant_export", "--export_fmt", "fakequant"], "fakequant"),
    ],
)
def test_layouts_by_their_names(words: list[str], layout: str) -> None:
    options = cli._read(["--model", "m", *words])
    assert options is not None
    config, problems = cli.to_config(options)
    assert (config.export_fmt, problems, config.problems()) == (layout, [], [])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--export_fmt", "tensorrt_llm"], "--export_fmt 'tensorrt_llm' is not known"),
        (["--export_fmt", "hf", "--vllm_fakequant_export"], "name two layouts"),
    ],
)
def test_layouts_that_are_refused(words: list[str], named: str) -> None:
    options = cli._read(["--model", "m", *words])
    assert options is not None
    config, problems = cli.to_config(options)
    assert named in "\n".join(map(str, (*problems, *config.problems())))


def test_the_layouts_known_without_torch_are_those_there_are() -> None:
    from hf_ptq.export.layouts import LAYOUTS

    assert set(EXPORT_FORMATS) == set(LAYOUTS)
    assert RunConfig.export_fmt == EXPORT_FORMATS[0]
