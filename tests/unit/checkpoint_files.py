"""Checkpoint directories made by hand, byte by byte, without torch: for tests of what reads them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def header_of(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> dict[str, Any]:
    """The JSON header of tensors given as name -> (dtype, shape, bytes)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return header


def file_bytes(header: object, data: bytes) -> bytes:
    """A safetensors file; `header` is JSON text in bytes, or something to be made JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, list[int], bytes]]) -> None:
    """A proper safetensors file."""
    path.write_bytes(file_bytes(header_of(tensors), b"".join(data for _, _, data in tensors.values())))


def bf16(shape: list[int], byte: int = 0) -> tuple[str, list[int], bytes]:
    """A BF16 tensor whose every byte is `byte`."""
    elements = 1
    for size in shape:
        elements *= size
    return "BF16", shape, bytes([byte]) * (2 * elements)


def write_index(directory: Path, weight_map: object) -> None:
    """model.safetensors.index.json."""
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_checkpoint(directory: Path, config: Mapping[str, Any] = LLAMA) -> Path:
    """A whole checkpoint of two files with an index: embedding and norm in the first, head in the second."""
    directory.mkdir(parents=True, exist_ok=True)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (directory / "config.json").write_text(json.dumps(dict(config)))
    write_tensors(directory / first, {"embed": bf16([4, 2], 1), "norm": ("F32", [3], bytes(range(12)))})
    write_tensors(directory / second, {"head": bf16([2, 4], 2)})
    write_index(directory, {"embed": first, "norm": first, "head": second})
    return directory
