"""The wrapped attention: bit-equal with quantizers off, and the ranges of keys and values are those of the data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tiny import BASE, CONFIGS
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_ptq.model.attention import attention_modules, is_latent, takes_registry, use_our_attention
from hf_ptq.quantization.apply import attach_quantizers, quantizing
from hf_ptq.quantization.assignment import Assignment, QuantizedCache
from hf_ptq.quantization.formats.description import FORMATS

IDS = torch.randint(3, 250, (2, 48), generator=torch.Generator().manual_seed(3))
LEFT_PADDED = torch.ones_like(IDS)
LEFT_PADDED[0, :9] = 0
SLIDING = {**BASE, "intermediate_size": 96, "sliding_window": 8}
KINDS: dict[str, tuple[str, dict]] = {
    "causal": CONFIGS["llama"],
    "sliding window": ("MistralConfig", SLIDING),
    "sliding and full": (
        "Gemma3TextConfig",
        {
            **SLIDING,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 16,
        },
    ),
    "chunked": (
        "Llama4TextConfig",
        {
            **BASE,
            "intermediate_size": 96,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "moe_layers": [],
        },
    ),
    "latent": CONFIGS["deepseek_v3"],
}


def make(kind: str, attention: str) -> PreTrainedModel:
    class_name, options = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(**options)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def with_cache(model: PreTrainedModel, name: str = "fp8", mla: str = "latent"):
    layers = {layer: layer for layer in attention_modules(model)}
    cache = QuantizedCache(FORMATS[name], FORMATS[name], mla, layers)
    return attach_quantizers(model, Assignment((), (), cache, ()))


@pytest.mark.parametrize("mask", [None, LEFT_PADDED], ids=["unpadded", "padded"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_are_bit_equal_with_quantizers_off(kind: str, attention: str, mask: torch.Tensor | None) -> None:
    model = make(kind, attention)
    assert attention_modules(model)
    assert all(takes_registry(module) for module in attention_modules(model).values())
    with torch.no_grad():
        expected = model(IDS, attention_mask=mask).logits
        with_cache(model)
        assert model.config.get_text_config()._attn_implementation == attention  # families ask for the name
        assert torch.equal(model(IDS, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["causal", "sliding window", "latent"])
def test_greedy_tokens_are_equal_with_a_cache(kind: str, attention: str) -> None:
    model = make(kind, attention)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(IDS[:, :20], **options)
    with_cache(model)
    assert torch.equal(model.generate(IDS[:, :20], **options), expected)


def capture_keys(model: PreTrainedModel, factor: float = 1.0) -> dict[str, tuple[float, float]]:
    """amax of keys and values that reach the kernel, by a kernel of the test's own."""
    seen: dict[str, list[float]] = {}
    names = {id(module): name for name, module in model.named_modules()}
    sdpa = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(module, query, key, value, *arguments, **options):
        name = names[id(module)]
        pair = seen.setdefault(name, [0.0, 0.0])
        seen[name] = [max(pair[0], float(key.abs().max())), max(pair[1], float(value.abs().max()))]
        return sdpa(module, query, key, value, *arguments, **options)

    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("spy", spy)
    transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register("spy", transformers.masking_utils.sdpa_mask)
    model.config._attn_implementation = "spy"
    with torch.no_grad():
        model(IDS)
    model.config._attn_implementation = "sdpa"
    return {name: (k, v) for name, (k, v) in seen.items()}


@pytest.mark.parametrize("factor", [0.01, 1.0, 1000.0])
def test_ranges_are_those_of_keys_and_values(factor: float) -> None:
    model = make("causal", "sdpa")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= factor
            layer.self_attn.v_proj.weight *= factor
    expected = capture_keys(model)
    quantizers = with_cache(model)
    pending = {key: (torch.zeros(1), torch.zeros(1)) for key in quantizers}
    for key, quantizer in quantizers.items():
        quantizer.start_observing(*pending[key])
    with torch.no_grad():
        model(IDS)
    for name, (k, v) in expected.items():
        assert pending[f"{name}.k"][0].item() == k
        assert pending[f"{name}.v"][0].item() == v


def make_latent() -> PreTrainedModel:
    """Keys computed from the latent are larger than the latent and the rotary key."""
    model = make("latent", "sdpa")
    with torch.no_grad():
        for module in attention_modules(model).values():
            module.kv_b_proj.weight *= 10
    return model


def test_latent_attention_is_calibrated_on_what_is_cached() -> None:
    """The normalised latent and the rotary key; `expanded` takes keys and values as the peer does."""
    model = make_latent()
    cached: dict[str, float] = {}
    names = {id(module): name for name, module in attention_modules(model).items()}
    assert all(is_latent(module) for module in attention_modules(model).values())
    from transformers import DynamicCache

    class Spy(DynamicCache):
        def update(self, latent, rotary, layer_idx, *arguments, **options):
            name = list(names.values())[layer_idx]
            cached[name] = max(float(latent.abs().max()), float(rotary.abs().max()))
            return super().update(latent, rotary, layer_idx, *arguments, **options)

    with torch.no_grad():
        model(IDS, cache=Spy(config=model.config))
    for mla, key_count in (("latent", 1), ("expanded", 2)):
        model = make_latent()
        quantizers = with_cache(model, mla=mla)
        pending = {key: torch.zeros(1) for key in quantizers}
        for key, quantizer in quantizers.items():
            quantizer.start_observing(pending[key], torch.zeros(1))
        with torch.no_grad():
            model(IDS)
        assert len(quantizers) == key_count * len(cached)
        differs = [name for name, amax in cached.items() if pending[f"{name}.k"].item() != amax]
        assert bool(differs) == (mla == "expanded")


def test_rounded_keys_change_the_logits_a_little() -> None:
    model = make("causal", "sdpa")
    with torch.no_grad():
        exact = model(IDS).logits
        quantizers = with_cache(model, "fp8_cast")
        with quantizing(quantizers.values()):
            rounded = model(IDS).logits
        assert torch.equal(model(IDS).logits, exact)
    assert 0 < (rounded - exact).norm() / exact.norm() < 0.2


def test_wrapping_twice_is_wrapping_once(tiny: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny("llama"))
    use_our_attention(model)
    name = model.config._attn_implementation
    use_our_attention(model)
    assert model.config._attn_implementation == name
