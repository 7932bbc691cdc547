"""`imports` and `$import` of ModelOpt's YAML files: pieces of configuration put in the place where they are named.

    imports: {nvfp4: configs/numerics/nvfp4}     # alias -> a piece of ModelOpt's library, or a file
    quant_cfg:
      - $import: some_entries                    # in a list: the entries of a list, or one entry
      - {quantizer_name: "*x", cfg: {$import: nvfp4, axis: 0}}   # in a mapping: its keys, those written here win

Pieces that ModelOpt ships have equivalents in `recipes/modelopt/library.yaml`, under ModelOpt's names. A file that is
imported says what it is in a comment, `# modelopt-schema: modelopt.<type>`; a list that has imports of its own is the
second document of its file. Files are looked up from the folder of the importing file, from those above it, from the
working directory, and in the library. This module knows nothing of what the configuration means.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hf_ptq.errors import Problem
from hf_ptq.quantization.yaml_files import read_documents

LIBRARY = Path(__file__).resolve().parent.parent / "recipes" / "modelopt" / "library.yaml"
SCHEMA = re.compile(r"^#\s*modelopt-schema:\s*(modelopt\.[\w.]+)\s*$", re.MULTILINE)
MARK = "$import"


def load_resolved(path: Path, problems: list[Problem], chain: tuple[Path, ...] = ()) -> Any:
    """The content of a file with every import in its place; None where problems were found."""
    documents, _ = read_documents(path)
    return _resolved(documents, path, problems, (*chain, path.resolve()))


@cache
def library() -> dict[str, Any]:
    """ModelOpt's name of each piece -> our content, imports in their place."""
    pieces: dict[str, Any] = yaml.safe_load(LIBRARY.read_text(encoding="utf-8"))["pieces"]
    done: dict[str, Any] = {}
    for name, piece in pieces.items():  # in order: a piece names earlier ones by their own names
        problems: list[Problem] = []
        done[name] = _Resolver(done, f"library: {name}", problems).value(piece, name)
        assert not problems, problems
    return done


def _library_name(name: str) -> str:
    return name.removesuffix(".yaml").removesuffix(".yml")


def _resolved(documents: list[Any], path: Path, problems: list[Problem], chain: tuple[Path, ...]) -> Any:
    head = documents[0] if documents else None
    if len(documents) == 2 and isinstance(head, dict) and set(head) <= {"imports"}:
        body, imports = documents[1], head.get("imports")
    elif len(documents) == 1:
        body = {k: v for k, v in head.items() if k != "imports"} if isinstance(head, dict) else head
        imports = head.get("imports") if isinstance(head, dict) else None
    else:
        what = f"{path}: {len(documents)} documents"
        problems.append(Problem(what, "a file is one document, or its imports and then its body"))
        return None
    imports = {} if imports is None else imports
    if not isinstance(imports, dict):
        problems.append(Problem(f"{path}: imports is no mapping", "write alias: file"))
        return None
    before = len(problems)
    known = {alias: _imported(str(target), alias, path, problems, chain) for alias, target in imports.items()}
    value = _Resolver(known, str(path), problems).value(body, "")
    return value if len(problems) == before else None


def _imported(target: str, alias: Any, importer: Path, problems: list[Problem], chain: tuple[Path, ...]) -> Any:
    """What an alias stands for; None where that cannot be had, which is then among the problems."""
    where = f"{importer}: imports.{alias}: {target}"
    path = _found(target, importer)
    if path is None and _library_name(target) in library():
        return library()[_library_name(target)]
    if path is None:
        pieces = ", ".join(sorted(library()))
        problems.append(Problem(f"{where}: there is no such file", f"give a path, or one of {pieces}"))
        return None
    if path in chain:
        problems.append(Problem(f"{where}: the files import each other", "take one of the imports out"))
        return None
    documents, text = read_documents(path)
    schemas = SCHEMA.findall(text)
    if len(schemas) != 1:
        what = f"{where}: the file says {len(schemas)} times what it is"
        problems.append(Problem(what, "it needs one comment such as # modelopt-schema: modelopt....QuantizerCfgEntry"))
        return None
    return _resolved(documents, path, problems, (*chain, path))


def _found(target: str, importer: Path) -> Path | None:
    folders = (*importer.resolve().parents, Path.cwd())
    names = [Path(target).expanduser().with_name(Path(target).name + end) for end in ("", ".yaml", ".yml")]
    return next((p.resolve() for folder in folders for name in names if (p := folder / name).is_file()), None)


class _Resolver:
    """Puts what is `known` by alias in the places of one file that name it."""

    def __init__(self, known: dict[Any, Any], where: str, problems: list[Problem]) -> None:
        self.known, self.where, self.problems = known, where, problems

    def value(self, value: Any, place: str) -> Any:
        """`value` with its imports in their place; `place` is its path in the file, for messages."""
        if isinstance(value, list):
            found: list[Any] = []
            for i, item in enumerate(value):
                found += self._items(item, f"{place}[{i}]")
            return found
        if not isinstance(value, dict):
            return value
        here = {key: self.value(item, f"{place}.{key}".strip(".")) for key, item in value.items() if key != MARK}
        if MARK not in value:
            return here
        aliases = value[MARK] if isinstance(value[MARK], list) else [value[MARK]]
        merged: dict[Any, Any] = {}
        for alias in aliases:
            piece = self._piece(alias, place)
            if isinstance(piece, dict):
                merged |= piece
            elif piece is not None:
                self._wrong(place, f"{alias!r} is a {type(piece).__name__}, which cannot be merged into a mapping")
        return merged | here

    def _items(self, item: Any, place: str) -> list[Any]:
        if not isinstance(item, dict) or set(item) != {MARK} or isinstance(item[MARK], list):
            return [self.value(item, place)]
        piece = self._piece(item[MARK], place)
        return piece if isinstance(piece, list) else [] if piece is None else [piece]

    def _piece(self, alias: Any, place: str) -> Any:
        if (
            not isinstance(alias, (list, dict)) and alias in self.known
        ):  # YAML reads some words, as off, as other values
            return self.known[alias]
        self._wrong(place, f"{MARK} {alias!r} is not among the imports ({', '.join(map(str, self.known)) or 'none'})")
        return None

    def _wrong(self, place: str, what: str) -> None:
        self.problems.append(Problem(f"{self.where}: {place or 'the file'}: {what}"))
