"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

HEADS, KV_HEADS = 4, 2
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = {"Ġ 2": "Ġ2", "Ġ Ġ": "ĠĠ", "h i": "hi"}  # merges, and the tokens they make
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), *WORDS.values()]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
}


def tiny_model(config: PretrainedConfig) -> PreTrainedModel:
    """A random model in bf16, norms not all ones."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def tiny_llama(tied: bool) -> PreTrainedModel:
    """Two layers of heads of 8."""
    return tiny_model(LlamaConfig(**SIZES, tie_word_embeddings=tied))


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k as llama.cpp orders them for its rope: the two halves of each head take turns."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def gguf_tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """The model's tensors by their names in GGUF, in float32 (bf16 values stay exact)."""
    architecture = ARCHITECTURES[model.config.model_type]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    turned = {"q_proj": HEADS, "k_proj": KV_HEADS} if architecture == gguf.MODEL_ARCH.LLAMA else {}
    tensors = {}
    for name, tensor in model.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        block = name.split(".")[2:3]
        if suffix == "gate_up_proj":
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                tensors[f"blk.{block[0]}.ffn_{part}_exps.weight"] = half
        elif suffix == "down_proj":
            tensors[f"blk.{block[0]}.ffn_down_exps.weight"] = tensor
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            heads = turned.get(stem.rsplit(".", 1)[-1])
            tensors[f"{names.get_name(stem)}.{suffix}"] = interleave(tensor, heads) if heads else tensor
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    extra: Mapping[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """A file of `tensors` with the metadata of a model of `SIZES`; `extra` is added to it, numbers as uint32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_rope_dimension_count(8)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(list(WORDS))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in ({"tokenizer.ggml.pre": "smollm"} | dict(extra or {})).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
