"""hf-ptq: post-training quantization of Hugging Face models, from one CPU to many nodes.

The command as a function:

    quantize_checkpoint(RunConfig(...))

Of a model in a script of your own (library.py, checkpointing.py say what each does):

    quantize, calibrate, enable, disable       give it quantizers, measure ranges, switch
    quantizers, summary                        look at them
    quantizer_state, restore_quantizers        what they know, as plain data, and back; model_state for the weights
    save_state, read_state                     a file of it
    learn_ranges, average_range_gradients      train ranges too
    export                                     the checkpoint that servers load
    register                                   let modules of a class be quantized
    distributed_run, decide_plan, load         the parts of a script of several ranks
    calibration_loop                           run a data loader through a model

All come on first use: importing the package loads nothing, so that `hf-ptq --help` does not wait for torch. (The
function behind `quantize_checkpoint` is `hf_ptq.run.run`. It cannot be had as `hf_ptq.run`: that is the module, from
the moment somebody imports it. The package `hf_ptq.export` can be called for the same reason.)
"""

from __future__ import annotations

_LIBRARY = (
    "average_range_gradients calibrate disable enable learn_ranges model_state quantize "
    "quantizer_state quantizers restore_quantizers summary"
)
_PLACES = {
    "RunConfig": ("hf_ptq.config", "RunConfig"),
    "quantize_checkpoint": ("hf_ptq.run", "run"),
    **{name: ("hf_ptq.library", name) for name in _LIBRARY.split()},
    "calibration_loop": ("hf_ptq.data.loader", "calibration_loop"),
    "save_state": ("hf_ptq.quantization.state", "save_state"),
    "read_state": ("hf_ptq.quantization.state", "read_state"),
    "register": ("hf_ptq.quantization.modules", "register"),
    "distributed_run": ("hf_ptq.distributed.process_group", "distributed_run"),
    "decide_plan": ("hf_ptq.checkpointing", "decide_plan"),
    "load": ("hf_ptq.checkpointing", "load"),
    "export": ("hf_ptq.export", ""),
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _PLACES:
        raise AttributeError(f"module 'hf_ptq' has no attribute {name!r}")
    from importlib import import_module

    if name == "export":
        return import_module("hf_ptq.export")
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
