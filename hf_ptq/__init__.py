"""hf-ptq: post-training quantization of Hugging Face models, from one CPU to many nodes.

`RunConfig(...)` says what to do and `quantize(config)` does it. Both come on first use: importing the package loads
nothing, so that `hf-ptq --help` does not wait for torch. (The function behind `quantize` is `hf_ptq.run.run`. It
cannot be had as `hf_ptq.run`: that is the module, from the moment somebody imports it.)
"""

from __future__ import annotations

_PLACES = {"RunConfig": ("hf_ptq.config", "RunConfig"), "quantize": ("hf_ptq.run", "run")}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _PLACES:
        raise AttributeError(f"module 'hf_ptq' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES, "__version__"])


def _version() -> str:
    """The installed version, or 0+checkout where the package runs from a checkout that was never installed."""
    from importlib import metadata

    try:
        return metadata.version("hf-ptq")
    except metadata.PackageNotFoundError:
        return "0+checkout"
