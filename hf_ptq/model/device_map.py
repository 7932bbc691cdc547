"""One process, several devices: a model spread by a device map of accelerate.

The map says for each module where its weights live: on a GPU, in host memory ("cpu"), or in a file ("disk"). What lives
on a GPU computes there; all else is brought to the main device when it is used, a decoder layer at a time, by
accelerate's hooks, and dropped again. (Where the main device is the CPU, "cpu" is where things compute.) A decoder
layer is never split, and tied weights stay together.

Weights that live where nothing is computed are meta tensors in the model; `Offloaded` has them. Whoever needs the
values, or has changed them, says so (`brought`).

It does not know recipes, exports or process groups.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import get_balanced_memory, set_module_tensor_to_device
from torch import nn
from transformers import PreTrainedModel

from hf_ptq.config import RunConfig
from hf_ptq.distributed.plan import CPU, DISK, Plan, Spread, free_bytes
from hf_ptq.errors import Problem, RunError, UserError
from hf_ptq.model.build import MetaModel
from hf_ptq.model.units import Unit, find_decoder_layers

WEIGHTS_SHARE = 0.8  # of what is free, where no option says more: the rest is for activations

# --- the map -----------------------------------------------------------------------------------


def measure_rooms(config: RunConfig, main: torch.device) -> dict[str, int]:
    """Device -> bytes that weights may take of it, as the options and the free memory have it."""
    if main.type == "cpu" and config.gpu_options():
        raise UserError(Problem(f"there is no GPU, {', '.join(config.gpu_options())} can do nothing", "leave it out"))
    free = {CPU: free_bytes(torch.device(CPU))}
    if main.type == "cuda":
        gpus = [main.index] if ":" in config.device else range(torch.cuda.device_count())
        free |= {f"cuda:{index}": free_bytes(torch.device("cuda", index)) for index in gpus}
    if config.offload_folder is not None:
        free[DISK] = _free_of_folder(config.offload_folder)
    return limit_rooms(config, free, str(main))


def limit_rooms(config: RunConfig, free: Mapping[str, int], main: str) -> dict[str, int]:
    """The same from the bytes that are free on each device. Host memory is taken if asked for, or if it is `main`."""
    share = config.gpu_max_mem_percentage
    if share is None:
        share = WEIGHTS_SHARE if config.max_gpu_memory_gb is None else 1.0
    rooms = {
        device: _at_most(config.max_gpu_memory_gb, int(size * share))
        for device, size in free.items()
        if device not in (CPU, DISK)
    }
    if config.max_cpu_memory_gb is not None:
        rooms[CPU] = _at_most(config.max_cpu_memory_gb, free[CPU])
    elif main == CPU or config.offload_folder is not None:
        rooms[CPU] = int(free[CPU] * WEIGHTS_SHARE)
    return rooms | ({DISK: free[DISK]} if DISK in free else {})


def _at_most(gigabytes: float | None, num_bytes: int) -> int:
    return num_bytes if gigabytes is None else min(num_bytes, int(gigabytes * 1e9))


def _free_of_folder(folder: Path) -> int:
    """Bytes free on the file system where `folder` is or will be; UserError where it cannot be written."""
    home = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not home.is_dir() or not os.access(home, os.W_OK):
        raise UserError(Problem(f"--offload_folder {folder}: {home} cannot be written", "take another folder"))
    found = os.statvfs(home)
    return found.f_bavail * found.f_frsize


def spread_model(
    model: PreTrainedModel, rooms: Mapping[str, int], *, sequential: bool, asked: Iterable[str], folder: Path | None
) -> Spread:
    """A map of the meta model over `rooms`: GPUs evenly, or one after the other (`sequential`), then host, then disk.

    What has no room is on "disk", whether or not there is one.
    """
    limits: dict[Any, Any] = {_accelerates_name(device): room for device, room in rooms.items() if device != DISK}
    whole = _whole_classes(model)
    with _tied(model):
        evenly = () if sequential else (get_balanced_memory(model, dict(limits), whole),)
        maps = [infer_auto_device_map(model, tried, whole, clean_result=False) for tried in (*evenly, dict(limits))]
    named = [{module: _our_name(device) for module, device in found.items()} for found in maps]
    sizes = [_bytes_by_device(model, device_map) for device_map in named]
    # Evenly filled GPUs may leave over what GPUs filled to the brim have room for.
    best = min(range(len(maps)), key=lambda i: (sizes[i].get(DISK, 0), sizes[i].get(CPU, 0)))
    return Spread(named[best], sizes[best], rooms, folder, tuple(asked))


def _accelerates_name(device: str) -> int | str:
    return int(device.partition(":")[2]) if device.startswith("cuda:") else device


def _our_name(device: Any) -> str:
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def _whole_classes(model: PreTrainedModel) -> list[str]:
    """Classes of the modules that are never split: decoder layers, and what the model itself names."""
    layers = find_decoder_layers(model)
    classes = {type(layer).__name__ for layer in model.get_submodule(layers).children()} if layers else set()
    return sorted(classes | set(model._no_split_modules or ()))


@contextmanager
def _tied(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block parameters that share a weight are one (on meta they are apart)."""
    own = {name: model.get_parameter(name) for name in model.all_tied_weights_keys}
    try:
        for name, source in model.all_tied_weights_keys.items():
            _set(model, name, model.get_parameter(source))
        yield
    finally:
        for name, parameter in own.items():
            _set(model, name, parameter)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)


def _bytes_by_device(model: PreTrainedModel, device_map: Mapping[str, str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, tensor in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            device = _home(device_map, name)
            sizes[device] = sizes.get(device, 0) + tensor.numel() * tensor.element_size()
    return sizes


def _home(device_map: Mapping[str, str], name: str) -> str:
    """Where a parameter lives: what the map says of it, or of the nearest module around it."""
    while name and name not in device_map:
        name = name.rpartition(".")[0]
    return device_map[name]


# --- weights that live elsewhere ---------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A tensor in the file."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype


class Offloaded(Mapping[str, torch.Tensor]):
    """Parameters that live where nothing is computed: in host memory, or in a file; each is a CPU tensor when asked.

    The file has no name in its folder, so that the system removes it when the process ends, in whatever way. A tensor
    from the file is a new one each time, one from memory is the one that is kept.
    """

    def __init__(self) -> None:
        self._in_memory: dict[str, torch.Tensor] = {}
        self._in_file: dict[str, _Stored] = {}
        self._same: dict[str, str] = {}  # tied: another name -> the name here
        self._file: IO[bytes] | None = None
        self._end = 0

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Have `tensor` (on the CPU) in memory."""
        self._in_memory[name] = tensor

    def store(self, name: str, tensor: torch.Tensor, folder: Path) -> None:
        """Have `tensor` (on the CPU) in the file, which is made in `folder`. Raises RunError where that fails."""
        if self._file is None:
            with _disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed by `close`
        self._in_file[name] = stored = _Stored(self._end, tensor.shape, tensor.dtype)
        self._end += tensor.nbytes
        self._write(stored, tensor)

    def update(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` (on any device) is what the parameter is from now on, where it lives."""
        name = self._same.get(name, name)
        if name in self._in_memory:
            self._in_memory[name].copy_(tensor)
        else:
            self._write(self._in_file[name], tensor.cpu())

    def tie(self, name: str, source: str) -> None:
        """`name` is the same parameter as `source`, which is here."""
        self._same[name] = source

    def close(self) -> None:
        """Give everything back."""
        self._in_memory.clear()
        self._in_file.clear()
        if self._file is not None:
            self._file.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        name = self._same.get(name, name)
        if name in self._in_memory:
            return self._in_memory[name]
        stored = self._in_file[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        view, done = _bytes_of(tensor), 0
        assert self._file is not None
        with _disk_errors():
            while done < len(view):
                count = os.preadv(self._file.fileno(), [view[done:]], stored.offset + done)
                assert count, f"{name} is not in the file"
                done += count
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._in_memory or name in self._in_file or name in self._same

    def __iter__(self) -> Iterator[str]:
        return iter((*self._in_memory, *self._in_file, *self._same))

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._in_file) + len(self._same)

    def _write(self, stored: _Stored, tensor: torch.Tensor) -> None:
        view, done = _bytes_of(tensor), 0
        assert self._file is not None
        with _disk_errors():
            while done < len(view):
                done += os.pwrite(self._file.fileno(), view[done:], stored.offset + done)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@contextmanager
def _disk_errors(folder: Path | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"--offload_folder{f' {folder}' if folder else ''}: {error.strerror or error}"
        raise RunError(Problem(what, "take a folder on a disk with more room")) from error


# --- the model ---------------------------------------------------------------------------------


def places_to_fill(meta: MetaModel, plan: Plan) -> dict[str, torch.device]:
    """Parameter (or buffer) -> where it is filled, if that is not the main device. Buffers are where they compute."""
    if not plan.device_map:
        return {}
    places = {}
    for name, tensor in meta.model.state_dict(keep_vars=True).items():
        home = _home(plan.device_map, name)
        if not isinstance(tensor, nn.Parameter) and home in (CPU, DISK):
            home = plan.device
        if home != plan.device:
            places[name] = torch.device(CPU if home == DISK else home)
    return places


def by_place(unit: Unit, meta: MetaModel, places: Mapping[str, torch.device]) -> list[Unit]:
    """The unit in parts, each of which is filled on one device."""
    parts: dict[torch.device | None, list[str]] = {}
    for name in unit.tensors:
        parts.setdefault(places.get(meta.placements[name].parameter or ""), []).append(name)
    return [Unit(unit.name, tuple(names)) for names in parts.values()]


def offload(unit: Unit, meta: MetaModel, plan: Plan, offloaded: Offloaded) -> None:
    """Take the parameters of a filled unit that live where nothing is computed out of the model."""
    if not plan.device_map:
        return
    for name in dict.fromkeys(meta.placements[tensor].parameter or "" for tensor in unit.tensors):
        home = _home(plan.device_map, name)
        if home == plan.device or home not in (CPU, DISK):
            continue
        owner, _, leaf = name.rpartition(".")
        parameter = meta.model.get_submodule(owner)._parameters.get(leaf)
        if parameter is None:
            continue  # a buffer
        if home == DISK:
            assert plan.offload_folder is not None
            offloaded.store(name, parameter.data, plan.offload_folder)
        else:
            offloaded.keep(name, parameter.data)
        set_module_tensor_to_device(meta.model, name, "meta")


def dispatch(model: PreTrainedModel, plan: Plan, offloaded: Offloaded) -> None:
    """Put the hooks of accelerate into a loaded model, so that it computes wherever its weights live."""
    if set(plan.device_map.values()) <= {plan.device}:
        return
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in offloaded:
            names[id(parameter)] = name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in offloaded and id(parameter) in names:
            offloaded.tie(name, names[id(parameter)])
    logger = logging.getLogger("accelerate.big_modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of parameters on meta: the plan has said what is where
    try:
        dispatch_model(
            model,
            dict(plan.device_map),
            main_device=plan.device,  # type: ignore[arg-type]
            state_dict=offloaded,  # type: ignore[arg-type]
            offload_index={},
            skip_keys=model._skip_keys_device_placement,  # type: ignore[arg-type]
            preload_module_classes=_whole_classes(model),
            force_hooks=True,
        )
    finally:
        logger.setLevel(level)


@contextmanager
def brought(
    model: nn.Module, names: Iterable[str], offloaded: Offloaded, device: torch.device, write_back: bool
) -> Iterator[None]:
    """Inside the block these parameters are on the device where they compute; `write_back`: they are changed there."""
    away = [name for name in dict.fromkeys(names) if name in offloaded]
    for name in away:
        set_module_tensor_to_device(model, name, device, value=offloaded[name], clear_cache=False)
    try:
        yield
        if write_back:
            for name in away:
                offloaded.update(name, model.get_parameter(name))
    finally:
        for name in away:
            set_module_tensor_to_device(model, name, "meta")


def release(model: nn.Module, plan: Plan, offloaded: Offloaded) -> None:
    """The model has done its work: no hooks, and nothing in the folder."""
    if plan.device_map:
        remove_hook_from_submodules(model)
    offloaded.close()
