"""What is written: tensors, layout of files, configuration for servers, verification.

The package can be called: `hf_ptq.export(model, source, directory)` is `hf_ptq.checkpointing.export`. The function has
the name that the package has, and Python keeps an imported package under its name, whatever else had it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("hf_ptq.checkpointing").export(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
