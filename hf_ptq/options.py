"""The surface of the command line: every flag, and every known flag that is not built.

Flags are named as ModelOpt's hf_ptq.py names them. typer reads the dataclass and fills it. A row of `NOT_BUILT` goes
when its flag comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hf_ptq.config import RunConfig

MODEL, QUANTIZATION, DATA, EXPORT, RUN = "Model", "Quantization", "Calibration data", "Export", "Run"
RANKS = "Several ranks (torchrun)"
SPREAD = "One process, a model larger than its device"

# Flags of ModelOpt's hf_ptq.py that are not built, and what to use. A row goes when its flag comes.
NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(
        (
            "--auto_quantize_bits",
            "--auto_quantize_method",
            "--auto_quantize_score_size",
            "--auto_quantize_checkpoint",
            "--auto_quantize_cost_model",
        ),
        "write the choice of formats into a --recipe file",
    ),
    "--awq_block_size": "AWQ is missing; use --qformat w4a16_nvfp4 for 4-bit weights",
    "--calib_with_images": "calibration is by text; give text to --dataset",
    "--cast_mxfp4_to_nvfp4": "quantized sources are not read; give a bf16 copy, and --qformat nvfp4",
    "--cpu_offload": "use --max_cpu_memory_gb for a model beyond the GPU's memory",
    "--inference_pipeline_parallel": "leave it out; servers split the checkpoint when they load it",
    "--inference_tensor_parallel": "leave it out; servers split the checkpoint when they load it",
    "--low_memory_mode": "use --max_cpu_memory_gb and --offload_folder for a model beyond the GPU's memory",
    **dict.fromkeys(
        ("--mlflow", "--mlflow_experiment", "--mlflow_run_name"), "read hf_ptq_report.json in the export instead"
    ),
    "--moe_calib_experts_ratio": "leave it out; tokens go to the experts that the router chooses",
    "--sparsity_fmt": "leave it out; weights stay dense",
    "--specdec_offline_dataset": "give text or rows of token ids to --dataset",
}


# fmt: off - one flag a paragraph: where it goes, what it says
@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line as typed, before sizes, lists and paths are read."""

    model: Annotated[
        str | None,
        typer.Option(
            "--pyt_ckpt_path",
            "--model",
            rich_help_panel=MODEL,
            metavar="SOURCE",
            help="What to quantize: a local directory, a hub id, a .gguf file, or the word demo. Required.",
        ),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            rich_help_panel=MODEL,
            help="Branch, tag or commit of a hub id. Default: the hub's main branch.",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust_remote_code",
            rich_help_panel=MODEL,
            help="Run Python code that comes with the model. Default: off.",
        ),
    ] = False
    attn_implementation: Annotated[
        str | None,
        typer.Option(
            "--attn_implementation",
            rich_help_panel=MODEL,
            help="Attention kernel of transformers: eager, sdpa, flash_attention_2 ... Default: the model's own.",
        ),
    ] = None

    experts_implementation: Annotated[
        str | None,
        typer.Option(
            "--experts_implementation",
            rich_help_panel=MODEL,
            help="Kernel that runs routed experts: grouped_mm (one product for all), eager (one for each). "
            "Default: grouped_mm.",
        ),
    ] = None

    qformat: Annotated[
        str | None,
        typer.Option(
            "--qformat",
            rich_help_panel=QUANTIZATION,
            metavar="RECIPE",
            help="What is quantized with what: a preset or a model recipe of --list, or the path of a recipe. "
            "Default: fp8.",
        ),
    ] = None
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            rich_help_panel=QUANTIZATION,
            metavar="RECIPE",
            help="The same as --qformat: a recipe of your own (YAML, ours or ModelOpt's) or the name of a shipped one. "
            "Default: none.",
        ),
    ] = None
    kv_cache_qformat: Annotated[
        str | None,
        typer.Option(
            "--kv_cache_qformat",
            rich_help_panel=QUANTIZATION,
            metavar="PRESET",
            help="Format of the KV cache; none leaves it alone. Default: the recipe's own, else fp8_cast.",
        ),
    ] = None

    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            rich_help_panel=DATA,
            metavar="NAMES",
            help="Calibration data, several by commas: names of --list, local .jsonl .json .txt .csv .parquet files or "
            "folders of them, or rows of token ids (.safetensors, or .jsonl with input_ids). "
            "Default: cnn_dailymail and nemotron-post-training-dataset-v2; pydoc for demo.",
        ),
    ] = None
    calib_size: Annotated[
        str | None,
        typer.Option(
            "--calib_size",
            rich_help_panel=DATA,
            metavar="ROWS",
            help="Calibration rows: one number for all data sets together, or one for each by commas. "
            "Default: 512; 8 for demo.",
        ),
    ] = None
    calib_seq: Annotated[
        int,
        typer.Option(
            "--calib_seq", rich_help_panel=DATA, help="Tokens in a row; documents are packed into rows without padding."
        ),
    ] = RunConfig.calib_seq
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch_size", rich_help_panel=DATA, help="Rows in a calibration batch; 0 chooses by the free memory."
        ),
    ] = RunConfig.batch_size

    export_path: Annotated[
        Path,
        typer.Option(
            "--export_path",
            rich_help_panel=EXPORT,
            metavar="DIRECTORY",
            help="Where the quantized checkpoint goes. It appears there when it is complete and verified.",
        ),
    ] = Path("exported_model")
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            rich_help_panel=EXPORT,
            help="Replace an earlier export; nothing else is ever removed. Default: off.",
        ),
    ] = False
    export_fmt: Annotated[
        str | None,
        typer.Option(
            "--export_fmt",
            rich_help_panel=EXPORT,
            metavar="LAYOUT",
            help="Layout of the export: modelopt (also called hf), compressed-tensors, fp8 (128x128 blocks, as Hugging "
            "Face's), fakequant (a plain checkpoint whose weights carry the error). Default: modelopt.",
        ),
    ] = None
    vllm_fakequant_export: Annotated[
        bool,
        typer.Option(
            "--vllm_fakequant_export",
            rich_help_panel=EXPORT,
            help="The same as --export_fmt fakequant. Default: off.",
        ),
    ] = False
    max_shard_size: Annotated[
        str,
        typer.Option(
            "--max_shard_size",
            rich_help_panel=EXPORT,
            metavar="SIZE",
            help="Largest weight file: 5GB, 500MB, 2GiB or a number of bytes.",
        ),
    ] = "5GB"
    durable: Annotated[
        bool,
        typer.Option(
            "--durable/--no-durable",
            rich_help_panel=EXPORT,
            help="Flush the export to the disk (fsync) before it gets its name.",
        ),
    ] = True

    ep_degree: Annotated[
        int | None,
        typer.Option(
            "--ep_degree",
            rich_help_panel=RANKS,
            help="Ranks that hold one copy of the routed experts together; 1 replicates them. "
            "Default: the largest divisor of the number of ranks that divides the experts.",
        ),
    ] = None
    dense: Annotated[
        str | None,
        typer.Option(
            "--dense",
            rich_help_panel=RANKS,
            metavar="HOW",
            help="What is no routed expert, in an expert-parallel run: replicated, or fsdp (sharded by FSDP2). "
            "Default: replicated if it fits.",
        ),
    ] = None
    use_fsdp2: Annotated[
        bool,
        typer.Option(
            "--use_fsdp2",
            rich_help_panel=RANKS,
            help="Shard every weight over the ranks: for dense models too large for one GPU. Default: off.",
        ),
    ] = False
    timeout_minutes: Annotated[
        float,
        typer.Option(
            "--timeout_minutes",
            rich_help_panel=RANKS,
            help="How long a rank waits for the others before the run fails, naming those that are missing; not while "
            "rank 0 downloads.",
        ),
    ] = RunConfig.timeout_minutes

    use_seq_device_map: Annotated[
        bool,
        typer.Option(
            "--use_seq_device_map",
            rich_help_panel=SPREAD,
            help="Fill one GPU after the other with layers. Default: off, all GPUs evenly, if one is too small.",
        ),
    ] = False
    gpu_max_mem_percentage: Annotated[
        float | None,
        typer.Option(
            "--gpu_max_mem_percentage",
            rich_help_panel=SPREAD,
            metavar="SHARE",
            help="Part of each GPU's free memory that weights may take, up to 1; the rest is for activations. "
            "Default: 0.8, and 1 with --max_gpu_memory_gb.",
        ),
    ] = None
    max_gpu_memory_gb: Annotated[
        float | None,
        typer.Option(
            "--max_gpu_memory_gb",
            rich_help_panel=SPREAD,
            help="GB (10^9 bytes) of weights on each GPU. Default: by --gpu_max_mem_percentage.",
        ),
    ] = None
    max_cpu_memory_gb: Annotated[
        float | None,
        typer.Option(
            "--max_cpu_memory_gb",
            rich_help_panel=SPREAD,
            help="GB of weights kept in host memory when the GPUs are full (with --device cpu: in all), and brought to "
            "the GPU for every use. Default: none; 80 % of what is free with --offload_folder or --device cpu.",
        ),
    ] = None
    offload_folder: Annotated[
        Path | None,
        typer.Option(
            "--offload_folder",
            rich_help_panel=SPREAD,
            metavar="DIRECTORY",
            help="Where weights lie that have no place in memory; they are read for every use, and gone when the run "
            "ends. Default: none, such a model is refused.",
        ),
    ] = None

    report_html: Annotated[
        Path | None,
        typer.Option(
            "--report_html",
            rich_help_panel=RUN,
            metavar="FILE",
            help="Write one self-contained page with the error of every layer and the experts' load. Default: none.",
        ),
    ] = None
    device: Annotated[
        str,
        typer.Option(
            "--device",
            rich_help_panel=RUN,
            help="cpu, cuda or cuda:N; auto takes a GPU if there is one. On several ranks cuda is each rank's own GPU.",
        ),
    ] = RunConfig.device
    skip_generate: Annotated[
        bool,
        typer.Option(
            "--skip_generate",
            rich_help_panel=RUN,
            help="No texts generated before and after quantization. Default: off.",
        ),
    ] = False
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry_run",
            rich_help_panel=RUN,
            help="Say what would be done, from the headers and the config alone, and stop. Default: off.",
        ),
    ] = False
    seed: Annotated[int, typer.Option("--seed", rich_help_panel=RUN, help="Seed of all random numbers.")] = (
        RunConfig.seed
    )
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose/--no-verbose",
            rich_help_panel=RUN,
            help="Show progress and tables; without it warnings and the summary only.",
        ),
    ] = True
    show_list: Annotated[
        bool,
        typer.Option(
            "--list",
            rich_help_panel=RUN,
            help="List presets, recipes, number formats, layouts and data sets, and stop.",
        ),
    ] = False
    show_version: Annotated[bool, typer.Option("--version", rich_help_panel=RUN, help="Say the version, and stop.")] = (
        False
    )


# fmt: on
