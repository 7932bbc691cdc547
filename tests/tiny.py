"""Tiny random checkpoints in the hub's layout, with a byte tokenizer: they prove plumbing, not quality.

Names ending in _wide have sizes that are multiples of 128, so that every block format fits; qwen3_moe_starved never
routes to experts 6 and 7. Weights are drawn wide so that outputs differ; nothing is left at zero.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

BASE = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
WIDE = {**BASE, "hidden_size": 256, "head_dim": 64, "num_hidden_layers": 2}
QWEN3_MOE = {
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
TOP2 = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32}
NO_HEAD_DIM = {key: value for key, value in BASE.items() if key != "head_dim"} | {"num_key_value_heads": 4}
GROUPED = {
    "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MLA = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}

CONFIGS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {**BASE, "intermediate_size": 96}),
    "llama_tied": ("LlamaConfig", {**BASE, "intermediate_size": 96, "tie_word_embeddings": True}),
    "llama_wide": ("LlamaConfig", {**WIDE, "intermediate_size": 384}),
    "qwen3": ("Qwen3Config", {**BASE, "intermediate_size": 96, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", {**BASE, **QWEN3_MOE}),
    "qwen3_moe_starved": ("Qwen3MoeConfig", {**BASE, **QWEN3_MOE}),
    "qwen3_moe_wide": ("Qwen3MoeConfig", {**WIDE, **QWEN3_MOE, "intermediate_size": 384, "moe_intermediate_size": 128}),
    "mixtral": ("MixtralConfig", {**BASE, **TOP2}),
    "deepseek_v3": ("DeepseekV3Config", {**NO_HEAD_DIM, **GROUPED, **MLA, "n_group": 2}),
    "glm4_moe": ("Glm4MoeConfig", {**BASE, **GROUPED, "n_group": 1}),
    "minimax_m2": ("MiniMaxM2Config", {**BASE, **TOP2}),
}
# Experts of a layer in one tensor on the hub.
FUSED_ON_THE_HUB: dict[str, tuple[str, dict]] = {
    "gpt_oss": ("GptOssConfig", {**BASE, **TOP2, "sliding_window": 16}),
    "gpt_oss_wide": ("GptOssConfig", {**WIDE, **TOP2, "intermediate_size": 128, "sliding_window": 16}),
}
VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 256,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
}  # fmt: skip
VISION_TOKENS = {
    "image_token_id": 253, "video_token_id": 254, "vision_start_token_id": 251, "vision_end_token_id": 252,
}  # fmt: skip
# For recipes of their own type only; whole-run tests of every preset leave them out.
FOR_RECIPES: dict[str, tuple[str, dict]] = {
    "qwen2_moe": ("Qwen2MoeConfig", {**NO_HEAD_DIM, **QWEN3_MOE, "shared_expert_intermediate_size": 96}),
    "nemotron_h": ("NemotronHConfig", {
        **WIDE, "hidden_size": 128, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64, "n_routed_experts": 8, "mamba_num_heads": 8, "mamba_head_dim": 32,
        "ssm_state_size": 16, "n_groups": 2, "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "use_mamba_kernels": False, "num_hidden_layers": 4,
    }),
    "kimi_linear": ("KimiLinearConfig", {
        **WIDE, **MLA, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64,
        "num_local_experts": 8, "num_experts_per_tok": 2, "linear_head_dim": 128, "linear_num_heads": 2,
        "kv_lora_rank": 128, "q_lora_rank": 128, "v_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    "deepseek_v3_wide": ("DeepseekV3Config", {
        **NO_HEAD_DIM, **GROUPED, "n_group": 2, "hidden_size": 256, "kv_lora_rank": 128, "q_lora_rank": 128,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 64,
    }),
}  # fmt: skip


def save_tiny(name: str, directory: Path, dtype: torch.dtype = torch.bfloat16, **changes: object) -> Path:
    """Write the tiny model `name`, with `changes` to its configuration, into `directory`; returns it."""
    class_name, options = (CONFIGS | FOR_RECIPES | FUSED_ON_THE_HUB)[name]
    config = getattr(transformers, class_name)(**{**options, **changes})
    model = build(name, config, dtype)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def build(name: str, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and parameter.abs().sum() == 0:
                parameter.normal_(std=0.05)
        biases = {key: b for key, b in model.named_buffers() if "e_score_correction_bias" in key}
        for buffer in biases.values():
            buffer.normal_(std=0.1)
        if name.endswith("_starved"):
            _starve(model)
    model.to(dtype)
    for key, buffer in model.named_buffers():
        if key in biases:
            buffer.data = buffer.data.float()  # as in the hub's checkpoints
    return model


def save_tiny_vision(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Qwen3-VL-MoE as on the hub: experts in one tensor a layer, [experts, inputs, rows]."""
    text = {**WIDE, **QWEN3_MOE, "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}}
    options = {"vision_config": VISION, "tie_word_embeddings": False, **VISION_TOKENS}
    config = transformers.Qwen3VLMoeConfig(text_config=text, **options)
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.05)
    model.to(dtype).save_pretrained(directory / "upright")
    byte_tokenizer().save_pretrained(directory / "upright")

    def transpose(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensors[name] = tensor.transpose(1, 2).contiguous()

    return altered(directory / "upright", directory / "hub", transpose)


def _starve(model: PreTrainedModel) -> None:
    """Channel 0 stays a positive constant that steers every token away from experts 6 and 7."""
    model.model.embed_tokens.weight[:, 0] = 5.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.experts.down_proj[:, 0] = 0.0
        layer.mlp.gate.weight[:6, 0] = 0.0
        layer.mlp.gate.weight[6:8] = 0.0
        layer.mlp.gate.weight[6:8, 0] = -50.0


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes to ids 3..252."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())[:250]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{symbol: i + 3 for i, symbol in enumerate(symbols)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def altered(source: Path, directory: Path, change: Callable[[dict[str, torch.Tensor]], object], **config) -> Path:
    """A copy of a checkpoint whose tensors went through `change` (in place), and whose config.json has `config`."""
    shutil.copytree(source, directory)
    tensors = {name: tensor.clone() for name, tensor in load_tensors(directory).items()}
    change(tensors)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return directory


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by name."""
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Dtype, shape and bytes: equal only for tensors that are the same bit for bit."""
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
