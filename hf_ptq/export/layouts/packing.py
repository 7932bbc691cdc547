"""Integer codes in 32-bit words, as compressed-tensors' pack-quantized format has them, from codes of a byte and back.

    word = sum over i of (code_i + 2^(bits-1)) * 2^(bits * i),   i = 0 .. 32/bits - 1 consecutive inputs

so that the lowest bits hold the first input and codes are stored without a sign.
"""

from __future__ import annotations

import torch

WORD_BITS = 32
PART_WORDS = 1 << 22  # words made at a time; the codes of a word are int32 while they are put together


def codes_to_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Signed int8 codes [..., in] -> int32 [..., in * bits / 32]; `in` is a multiple of 32 / bits."""
    per_word = WORD_BITS // bits
    flat = codes.reshape(-1, per_word)
    words = torch.empty(len(flat), dtype=torch.int32, device=codes.device)
    for start in range(0, len(flat), PART_WORDS):
        part = flat[start : start + PART_WORDS].to(torch.int32) + (1 << (bits - 1))
        word = part[:, 0].clone()
        for place in range(1, per_word):
            word |= part[:, place] << (bits * place)
        words[start : start + PART_WORDS] = word
    return words.view(*codes.shape[:-1], codes.shape[-1] // per_word)


def words_to_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse; int8 codes."""
    mask, offset = (1 << bits) - 1, 1 << (bits - 1)
    places = [((words >> (bits * place)) & mask) - offset for place in range(WORD_BITS // bits)]
    return torch.stack(places, dim=-1).to(torch.int8).flatten(-2)
