"""Attention that lets quantizers see keys and values, whatever kernel computes it.

transformers looks the attention kernel up by name (`ALL_ATTENTION_FUNCTIONS`). The kernel in use is registered anew
under its own name, wrapped: the wrapper hands keys and values (after rotary embedding, as the kernel gets them) to
the submodules `k_quantizer` and `v_quantizer` of the attention module, if it has them, and calls the kernel; for
every other module it is the kernel. A name of its own would not do: it needs a mask function of that name, and some
families (sparse attention) ask for the name of the kernel and leave a mask out where they do not know it.

The cache holds keys and values as they were computed, so the wrapper rounds all of them in each step; rounding is a
function of each row alone, so this gives what a cache of rounded rows would.

Multi-head latent attention caches the normalised latent and the rotary key, from which keys and values are computed.
There one quantizer sees both: the output of the latent's norm, by a hook, and the rotary part of each key, which is
its last `qk_rope_head_dim` numbers. (vLLM and SGLang scale the whole cache row by `k_scale`.)

Modules that do not look their kernel up by name are found on the meta model by `takes_registry`. This file does not
know what the quantizers do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

K_QUANTIZER = "k_quantizer"
V_QUANTIZER = "v_quantizer"
OUTPUT_QUANTIZER = "output_quantizer"
KEY_LEAVES = ("k_proj", "kv_b_proj", "qkv_proj")  # a module that owns one of these is an attention module
LATENT_NORM = "kv_a_layernorm"
Kernel = Callable[..., Any]


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Name -> attention module of the language model, in order: those that own a projection to keys.

    Towers for images and sound have attention too, but no cache that a server keeps.
    """
    decoder = model.get_decoder()
    prefix = next((f"{name}." for name, module in model.named_modules() if name and module is decoder), "")
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if leaf in KEY_LEAVES and isinstance(module, nn.Linear) and f"{name}.".startswith(prefix):
            found.setdefault(parent, model.get_submodule(parent))
    return found


def takes_registry(module: nn.Module) -> bool:
    """True for an attention module whose own source file looks the kernel up by name."""
    return "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(module).__module__])


def is_latent(module: nn.Module) -> bool:
    """True for multi-head latent attention: keys and values come from a normalised latent."""
    return {LATENT_NORM, "kv_b_proj"} <= module._modules.keys()


def attach_latent_quantizer(module: Any, quantizer: nn.Module) -> None:
    """Let `quantizer` see what multi-head latent attention caches."""
    module.add_module(K_QUANTIZER, RotaryPart(quantizer, module.qk_rope_head_dim))
    norm = module.get_submodule(LATENT_NORM)
    norm.add_module(OUTPUT_QUANTIZER, quantizer)
    norm.register_forward_hook(quantize_output)


def quantize_output(module: Any, _arguments: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    """A forward hook."""
    return module.output_quantizer(output)


class RotaryPart(nn.Module):
    """Applies a quantizer to the last `size` numbers of each row."""

    def __init__(self, quantizer: nn.Module, size: int) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.size = size

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys [batch, heads, tokens, head_dim], the rotary part rounded if the quantizer rounds."""
        rotary = keys[..., -self.size :]
        rounded = self.quantizer(rotary)
        return keys if rounded is rotary else torch.cat([keys[..., : -self.size], rounded], dim=-1)


def use_our_attention(model: PreTrainedModel) -> None:
    """Wrap the kernel that the language model of `model` uses; once, however often it is called."""
    name = str(model.config.get_text_config()._attn_implementation)
    kernel = ALL_ATTENTION_FUNCTIONS.get(name)  # None for eager, which each family's file has for itself
    if not (isinstance(kernel, partial) and kernel.func is _attention_forward):
        ALL_ATTENTION_FUNCTIONS.register(name, partial(_attention_forward, wrapped=kernel))


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *arguments: Any,
    wrapped: Kernel | None,
    **options: Any,
) -> Any:
    """query, key, value [batch, heads, tokens, head_dim] -> what the wrapped kernel gives."""
    key, value = _quantized(module, K_QUANTIZER, key), _quantized(module, V_QUANTIZER, value)
    kernel = wrapped if wrapped is not None else _eager_kernel(module)
    return kernel(module, query, key, value, *arguments, **options)


def _eager_kernel(module: nn.Module) -> Kernel:
    """The eager kernel is no entry of the registry: each family's file has its own."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"]


def _quantized(module: nn.Module, name: str, values: torch.Tensor) -> torch.Tensor:
    quantizer = module._modules.get(name)
    return values if quantizer is None else quantizer(values)
