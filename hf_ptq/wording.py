"""Errors in the words of those who read them.

Messages name what was asked for by the command's options: `--overwrite`. A script has no options, it calls functions
with arguments. So the functions of the library that can be refused put what leaves them into their own words: an option
that they have as an argument gets its name, any other is said to be the command's.

    --export_path out holds an earlier export       directory out holds an earlier export
        -> add --overwrite to replace it                -> add overwrite=True to replace it
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import ParamSpec, TypeVar

from hf_ptq.config import RunConfig
from hf_ptq.errors import HfPtqError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
ARGUMENTS = {  # option -> argument, where the library calls the same thing otherwise
    "export_path": "directory",
    "max_shard_size": "max_shard_bytes",
    "model": "source",
    "pyt_ckpt_path": "source",
    "qformat": "recipe",
}
OPTIONS = {
    *(field.name for field in fields(RunConfig)),
    *ARGUMENTS,
    *("dataset", "calib_size", "list", "vllm_fakequant_export"),
}
OPTION = re.compile(r"(?:the command's )?--([a-z]\w*)")


def in_own_words(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function of the library: errors that leave it name its arguments."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except HfPtqError as error:
            error.reword(lambda text: reworded(text, parameters))
            raise

    return called


def reworded(text: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    """The text with the command's options as a function with these parameters has them. Twice is as good as once."""

    def say(match: re.Match[str]) -> str:
        option = match[1]
        argument = parameters.get(ARGUMENTS.get(option, option))
        if option not in OPTIONS:
            return match[0]
        if argument is None:
            return f"the command's --{option}"
        return f"{argument.name}=True" if argument.default is False else argument.name

    return OPTION.sub(say, text)
