"""The rules of the design that a reader relies on, checked over the source text by AST.

Each rule is a function from a parsed file to complaints "file:line: what"; each is also shown a small file that breaks
it, so that a rule that sees nothing is noticed.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hf_ptq"

# A unit may import units of its own level or below; within a level there must be no circle. A subpackage named here
# has a level of its own, apart from its parent's.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "config", "sizes", "wording"),
    ("distributed", "report", "memory"),
    ("checkpoint", "quantization.formats"),
    ("model",),
    ("quantization", "data"),
    ("export", "preview"),
    (
        "run",
        "planning",
        "sourcing",
        "steps",
        "driver",
        "preflight",
        "report_html",
        "report_plots",
        "library",
        "checkpointing",
    ),
    ("options", "cli"),
    ("__main__",),
)
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MAY_IMPORT_TRANSFORMERS_INSIDES = (
    "model/build.py",
    "model/sharding.py",
    "model/exchange.py",
    "model/experts.py",
    "model/attention.py",
)
MAY_EXCEPT_BROADLY = ("distributed/agreement.py", "preview.py", "cli.py")
MAY_PRINT = ("report.py", "cli.py")
# gguf.py: the values of `tokenizer.ggml.pre` and `general.architecture`, words of that file format.
MAY_NAME_FAMILIES = ("model/families.py", "checkpoint/gguf.py")
FAMILIES = (
    "llama", "qwen", "mixtral", "mistral", "deepseek", "minimax", "glm", "gpt_oss", "gptoss", "nemotron",
    "gemma", "kimi", "phi", "dbrx", "falcon", "jamba", "granite", "olmo", "cohere", "starcoder", "llava",
    "step3p7", "whisper",
)  # fmt: skip
# Names of data sets and of a tool, and hub ids given as examples, decide nothing about a model.
NO_FAMILY = re.compile(
    r"(?i:(cnn[-_])?nemotron[-_](post[-_]training[-\w]*|v\d\w*|vlm[-\w]*))"
    r"|llama\.cpp|llama-gguf-split|\b[\w-]+/[A-Z][\w.-]+"
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:wo" r"rk|tmp/w)/")  # in two pieces, so that this file passes


@dataclass(frozen=True)
class Source:
    """A file of the package: its path inside it, and its text."""

    name: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def module(self) -> str:
        """Dotted name inside the package; a package's own name for its __init__."""
        parts = self.name.removesuffix(".py").split("/")
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def package_sources() -> list[Source]:
    files = sorted(PACKAGE.rglob("*.py"))
    return [Source(str(file.relative_to(PACKAGE)), file.read_text(encoding="utf-8")) for file in files]


def unit_of(module: str) -> str | None:
    """The unit of a dotted module inside hf_ptq; None for the package's own __init__."""
    parts = module.split(".")
    for length in (2, 1):
        unit = ".".join(parts[:length])
        if unit in LEVEL_OF:
            return unit
    return None if module in ("", "__init__") else parts[0]


def imports_of(source: Source) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import, those inside functions and TYPE_CHECKING too."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""
            if node.module == "hf_ptq" or (node.module or "").startswith("hf_ptq."):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ["hf_ptq", *source.name.split("/")[:-1]][: -node.level + 1 or None]
            yield node.lineno, ".".join([*base, node.module or ""]).rstrip(".")
            yield from ((node.lineno, ".".join(filter(None, [*base, node.module, a.name]))) for a in node.names)


def inner_imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, unit) for each import of another unit of hf_ptq."""
    own = unit_of(source.module)
    for line, module in imports_of(source):
        if module.startswith("hf_ptq."):
            unit = unit_of(module.removeprefix("hf_ptq."))
            if unit is not None and unit != own:
                yield line, unit


def import_direction(source: Source) -> Iterator[str]:
    own = unit_of(source.module)
    if own is None:
        for line, unit in inner_imports(source):
            yield f"{source.name}:{line}: the package's __init__ imports {unit}"
        return
    if own not in LEVEL_OF:
        yield f"{source.name}:1: {own} has no place in LEVELS"
        return
    for line, unit in inner_imports(source):
        names_a_unit = unit in LEVEL_OF
        if names_a_unit and LEVEL_OF[unit] > LEVEL_OF[own]:
            yield f"{source.name}:{line}: {own} imports {unit}, which stands above it"


def _is_inside_transformers(module: str) -> bool:
    """True for a submodule of transformers that is not one of its public names."""
    if not module.startswith("transformers.") or module == "transformers.utils.logging":
        return False
    spec = importlib.util.find_spec("transformers")
    folders = spec.submodule_search_locations if spec else None
    part = module.split(".")[1]
    return any((Path(f) / part).is_dir() or (Path(f) / f"{part}.py").is_file() for f in folders or ())


def transformers_insides(source: Source) -> Iterator[str]:
    if source.name in MAY_IMPORT_TRANSFORMERS_INSIDES:
        return
    for node in ast.walk(source.tree):
        reached: list[str] = []
        if isinstance(node, ast.Import):
            reached = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            reached = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            reached = [f"{node.value.id}.{node.attr}"]
        for module in reached:
            if _is_inside_transformers(module) and module != "transformers.utils":
                yield f"{source.name}:{node.lineno}: reaches into {module}"


def size_budgets(source: Source) -> Iterator[str]:
    count = len(source.text.splitlines())
    if count > MAX_FILE_LINES:
        yield f"{source.name}:{MAX_FILE_LINES + 1}: {count} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(source.tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{source.name}:{node.lineno}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
        args = node.args
        names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if a]
        parameters = [name for name in names if name not in ("self", "cls")]
        if len(parameters) > MAX_PARAMETERS:
            count = len(parameters)
            yield f"{source.name}:{node.lineno}: {node.name} has {count} parameters, more than {MAX_PARAMETERS}"


def broad_excepts(source: Source) -> Iterator[str]:
    if source.name in MAY_EXCEPT_BROADLY:
        return
    for node in ast.walk(source.tree):
        caught: list[ast.expr] = []
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                yield f"{source.name}:{node.lineno}: bare except"
            elif isinstance(node.type, ast.Tuple):
                caught = node.type.elts
            else:
                caught = [node.type]
        elif isinstance(node, ast.Call) and _called_name(node) == "suppress":
            caught = node.args
        for name in caught:
            if isinstance(name, ast.Name) and name.id in ("Exception", "BaseException"):
                yield f"{source.name}:{node.lineno}: catches {name.id}"


def _called_name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def probing(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id == "hasattr":
            yield f"{source.name}:{node.lineno}: hasattr"


def printing(source: Source) -> Iterator[str]:
    if source.name in MAY_PRINT:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{source.name}:{node.lineno}: print"


def _docstrings(tree: ast.Module) -> set[int]:
    """ids of the constants that are statements of their own: docstrings of modules, functions, classes and fields."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of identifiers and of strings that are no docstrings."""
    docstrings = _docstrings(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield line, node.value
        elif isinstance(node, ast.Name):
            yield line, node.id
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.alias):
            yield line, node.name


def _family_in(text: str) -> str | None:
    """The family that a text names as a word ("Qwen3MoeConfig", "model.llama_tied"), or None."""
    text = NO_FAMILY.sub("", text)
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower().replace("-", "_")
    for family in FAMILIES:
        if re.search(rf"(?<![a-z]){family}(?![a-z])", text):
            return family
    return None


def family_names(source: Source) -> Iterator[str]:
    if source.name in MAY_NAME_FAMILIES:
        return
    for line, text in _texts(source.tree):
        family = _family_in(text)
        if family:
            yield f"{source.name}:{line}: names the family {family!r}"


RULES: dict[str, Callable[[Source], Iterator[str]]] = {
    "imports go one way": import_direction,
    "transformers' insides stay in model/build, experts, attention": transformers_insides,
    "size budgets": size_budgets,
    "no broad except": broad_excepts,
    "no hasattr": probing,
    "no print": printing,
    "families are named in families.py only": family_names,
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_package_keeps(rule):
    complaints = [complaint for source in package_sources() for complaint in rule(source)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_units_import_each_other_without_a_circle():
    edges: dict[str, dict[str, str]] = {}
    for source in package_sources():
        own = unit_of(source.module)
        for line, unit in inner_imports(source):
            if own is not None:
                edges.setdefault(own, {}).setdefault(unit, f"{source.name}:{line}")
    assert (circle := find_circle(edges)) is None, circle


def find_circle(edges: dict[str, dict[str, str]]) -> str | None:
    """A circle in a graph of imports, told with the places of its imports; None if there is none."""
    done: set[str] = set()

    def visit(unit: str, path: list[str]) -> str | None:
        if unit in path:
            loop = [*path[path.index(unit) :], unit]
            return "; ".join(f"{a} -> {b} ({edges[a][b]})" for a, b in itertools.pairwise(loop))
        if unit not in done:
            for target in edges.get(unit, {}):
                found = visit(target, [*path, unit])
                if found:
                    return found
            done.add(unit)
        return None

    return next((found for unit in edges if (found := visit(unit, []))), None)


def test_the_package_init_imports_nothing():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    modules = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert modules == ["__future__"]
    assert not any(isinstance(node, ast.Import) for node in tree.body)


def test_no_machine_path_in_the_repository():
    places = ("hf_ptq", "tests", "slurm", ".ci", "README.md", "pyproject.toml", "hf-ptq")
    found = []
    for place in places:
        start = ROOT / place
        for file in sorted(start.rglob("*")) if start.is_dir() else [start]:
            if file.is_file() and file.suffix not in (".pyc", ".safetensors"):
                lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
                found += [
                    f"{file.relative_to(ROOT)}:{i}: {line.strip()}"
                    for i, line in enumerate(lines, 1)
                    if MACHINE_PATH.search(line)
                ]
    assert not found, "\n" + "\n".join(found)


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60
VIOLATIONS = [
    (import_direction, "model/units.py", "def f():\n    from hf_ptq.quantization.apply import x\n", "model/units.py:2"),
    (import_direction, "quantization/formats/fp8.py", "import hf_ptq.quantization.apply\n", "fp8.py:1"),
    (import_direction, "quantization/formats/fp8.py", "from ..recipe import load_recipe\n", "fp8.py:1"),
    (import_direction, "checkpoint/slices.py", "from hf_ptq import run\n", "slices.py:1"),
    (import_direction, "__init__.py", "from hf_ptq.config import RunConfig\n", "__init__.py:1"),
    (import_direction, "novelty.py", "x = 1\n", "novelty.py:1: novelty has no place"),
    (transformers_insides, "run.py", "import transformers.modeling_utils\n", "run.py:1"),
    (transformers_insides, "run.py", "from transformers.core_model_loading import x\n", "run.py:1"),
    (transformers_insides, "run.py", "from transformers import modeling_utils\n", "run.py:1"),
    (transformers_insides, "run.py", "\nx = transformers.modeling_utils\n", "run.py:2"),
    (size_budgets, "run.py", "x = 1\n" * 401, "run.py:401: 401 lines"),
    (size_budgets, "run.py", LONG_FUNCTION, "run.py:1: f has 61 lines"),
    (size_budgets, "run.py", "def f(a, b, c, d, e, *f, g, **h): ...\n", "f has 8 parameters"),
    (broad_excepts, "run.py", "try:\n    x\nexcept (OSError, Exception):\n    y\n", "run.py:3"),
    (broad_excepts, "run.py", "try:\n    x\nexcept:\n    y\n", "run.py:3: bare"),
    (broad_excepts, "run.py", "with contextlib.suppress(Exception):\n    y\n", "run.py:1"),
    (probing, "run.py", "x = hasattr(a, 'b')\n", "run.py:1"),
    (printing, "run.py", "print('x')\n", "run.py:1"),
    (family_names, "run.py", "x = 'LlamaForCausalLM'\n", "'llama'"),
    (family_names, "run.py", "def f(is_qwen3_moe): ...\n", "'qwen'"),
    (family_names, "run.py", "x = model.gpt_oss\n", "'gpt_oss'"),
    (family_names, "run.py", "x = 'nemotron_h'\n", "'nemotron'"),
]


@pytest.mark.parametrize(("rule", "name", "text", "complaint"), VIOLATIONS)
def test_a_rule_sees_its_violation(rule, name, text, complaint):
    assert complaint in "\n".join(rule(Source(name, text)))


HARMLESS = [
    (import_direction, "preflight.py", "from hf_ptq.quantization.recipe import x\nfrom hf_ptq import errors\n"),
    (import_direction, "quantization/apply.py", "from hf_ptq.quantization.formats import x\nfrom . import modules\n"),
    (transformers_insides, "run.py", "from transformers import AutoConfig\nfrom transformers.utils import logging\n"),
    (transformers_insides, "model/build.py", "from transformers.modeling_utils import x\n"),
    (size_budgets, "run.py", "class C:\n    def f(self, a, b, c, d, e, f, g): ...\n"),
    (broad_excepts, "run.py", "try:\n    x\nexcept OSError:\n    y\n"),
    (family_names, "run.py", '"""About llama."""\nx = "nemotron-v2, philosophy, Qwen/Qwen3-0.6B"\n'),
]


@pytest.mark.parametrize(("rule", "name", "text"), HARMLESS)
def test_a_rule_lets_pass(rule, name, text):
    assert not list(rule(Source(name, text)))


def test_a_circle_is_found():
    assert find_circle({"a": {"b": "a.py:1"}, "b": {"a": "b.py:2"}}) == "a -> b (a.py:1); b -> a (b.py:2)"
    assert find_circle({"a": {"b": "a.py:1", "c": "a.py:2"}, "b": {"c": "b.py:2"}}) is None


def test_every_folder_of_tests_is_collected(pytestconfig):
    """Pytest leaves out folders of some names unless it is told, `dist` among them."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert {"unit", "dist", "end_to_end"} <= names
    assert [(name, pattern) for name in sorted(names) for pattern in left_out if fnmatch(name, pattern)] == []
