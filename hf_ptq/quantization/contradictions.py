"""What rules say of keys and values beside something else that decides them: an option, or a file's `kv_cache`.

Only rules that name attention count. One for every module of a file of ModelOpt's (`*`) is about linears.
"""

from __future__ import annotations

from collections.abc import Iterable

from hf_ptq.quantization.rules import OFF, AnyRule


def says_otherwise(rules: Iterable[AnyRule], cache: Iterable[AnyRule], or_off: bool = False) -> str:
    """Those of the rules that give keys and values, by name, what the rules `cache` do not give them, in words.

    `or_off`: also those that turn off what `cache` quantizes.
    """
    meant = {tensor: word for rule in cache for tensor, word in rule.of_attention.items()}
    told = []
    for rule in rules:
        said = rule.of_attention
        if any(meant.get(tensor, OFF) != word and (or_off or word != OFF) for tensor, word in said.items()):
            words = ", ".join(f"{tensor} {word}" for tensor, word in said.items())
            told.append(f"{rule.attention_patterns[0]!r}: {words}")
    return "; ".join(told)
