"""Integer codes in 32-bit words, as compressed-tensors' pack-quantized format has them, to and from our codecs'.

    word = sum over i of (code_i + 2^(bits-1)) * 2^(bits * i),   i = 0 .. 32/bits - 1 consecutive inputs

so that the lowest bits hold the first input and codes are stored without a sign. Our int4 codec has pairs of rows in a
byte (the even row in the low nibble, two's complement), our int8 codec a byte for each code.
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


def row_pairs_to_codes(packed: torch.Tensor) -> torch.Tensor:
    """Bytes uint8 [..., out / 2, in] with two rows each -> signed int8 codes [..., out, in]."""
    signed = packed.view(torch.int8)
    low, high = (signed << 4) >> 4, signed >> 4  # arithmetic shifts bring the sign along
    return torch.stack([low, high], dim=-2).flatten(-3, -2)


def codes_to_row_pairs(codes: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    pairs = codes.view(torch.uint8).unflatten(-2, (-1, 2))
    return (pairs[..., 0, :] & 15) | (pairs[..., 1, :] << 4)
