"""Reading YAML files of recipes: what is wrong with one becomes a message that names the file and the key."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from yaml.error import MarkedYAMLError

from hf_ptq.errors import Problem, UserError

Model = TypeVar("Model", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """PyYAML takes the last of two equal keys in silence; here they are an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping as written; keys that `<<` merges in later may be said again beside it."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


def read_documents(path: Path) -> tuple[list[Any], str]:
    """The documents of a YAML file, and its text. Raises UserError where it is no YAML or cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        return list(yaml.load_all(text, _Loader)), text
    except (yaml.YAMLError, ValueError, TypeError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise UserError(Problem(f"{path} cannot be read as text: {error}", "give a YAML file in UTF-8")) from error
        raise UserError(Problem(f"{path} is not valid YAML: {' '.join(str(error).split())}")) from error
    except OSError as error:
        raise UserError(Problem(f"{path} cannot be read as text: {error}", "give a YAML file in UTF-8")) from error
    except RecursionError as error:
        raise UserError(Problem(f"{path} is nested too deeply")) from error


def validated(
    model: type[Model], data: Any, where: str, problems: list[Problem], context: bool = False
) -> Model | None:
    """`data` as a `model`; what is wrong is appended to `problems`, an entry a key. `context`: for its validators."""
    try:
        return model.model_validate(data, context=context)
    except ValidationError as error:
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
                near = difflib.get_close_matches(key, model.model_fields, 1)
                cure = (f"did you mean {near[0]!r}? " if near else "") + f"known keys: {', '.join(model.model_fields)}"
                problems.append(Problem(f"{where}: unknown key {key!r}", cure))
            else:
                message = item["msg"].removeprefix("Value error, ")
                problems.append(Problem(f"{where}: {key + ': ' if key else ''}{message}"))
        return None
