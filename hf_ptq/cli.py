"""The command line: text in, `RunConfig` out, exit codes.

`Options` (options.py) is the whole surface; typer reads the dataclass and fills it. Hyphens and underscores mean the
same. Flags of ModelOpt's hf_ptq.py which are not built are refused by name, with what to use in their place, and so is
any other unknown flag, all of them at once.

Exit codes: 0; 1 the run failed; 2 the request was wrong; 130 interrupted (torchrun has codes of its own). `--help`,
`--list` and refusals import no torch: hf_ptq.run is imported only when the request has passed preflight.
"""

from __future__ import annotations

import difflib
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import typer

from hf_ptq.config import EXPORT_ALIASES, RunConfig, parse_counts, parse_names
from hf_ptq.distributed.launch import Launch, read_launch
from hf_ptq.errors import HfPtqError, Problem, UserError, as_text, refuse_if_any
from hf_ptq.options import NOT_BUILT, Options
from hf_ptq.sizes import parse_size

Parsed = TypeVar("Parsed")
SECONDS_FOR_THE_FIRST = 10

HELP = """Quantize a Hugging Face model after training, and write a checkpoint that vLLM, SGLang and TensorRT-LLM
serve.

Example: hf-ptq --model demo --qformat nvfp4 --export_path demo-nvfp4"""


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line (default: this process's) asks for, and return the exit code.

    The last stop of every exception: messages for the user come out as one block, bugs of ours as a traceback.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    launch = read_launch()
    try:
        return _answer(words, launch)
    except HfPtqError as error:
        _tell(as_text(error), launch)
        return error.exit_code
    except KeyboardInterrupt:
        typer.echo("hf-ptq: interrupted", err=True)
        return 130
    except Exception as error:  # noqa: BLE001  (anything may arrive here: a bug of ours, told with its place)
        short = "--no_verbose" in map(_with_underscores, words)
        lines = traceback.format_exception(error, limit=-1 if short else None)
        _tell("".join(lines) + "hf-ptq: the run failed with an error that it does not know (above)", launch)
        return 1


def _tell(text: str, launch: Launch) -> None:
    """Show a message. Of several ranks, none of which has met the others yet, the first shows it.

    They are likely to have the same, and torchrun ends all of a node when one of them ends: the others give the first
    the time to show it, and show theirs if they are still there then.
    """
    if launch.rank:
        if launch.num_nodes == 1:
            time.sleep(SECONDS_FOR_THE_FIRST)
        elif _first_tells(launch):
            return
        text = f"{launch.name}: {text}"
    typer.echo(text, err=True)
    if launch.num_nodes > 1:
        from hf_ptq.distributed.process_group import tell_other_nodes

        tell_other_nodes(launch, text)


def _first_tells(launch: Launch) -> bool:
    from hf_ptq.distributed.process_group import first_tells

    return first_tells(launch, SECONDS_FOR_THE_FIRST)


def _answer(words: Sequence[str], launch: Launch) -> int:
    options = _read(words)
    if not isinstance(options, Options):
        return 0  # --help has been shown
    if options.show_version:
        from hf_ptq import __version__

        typer.echo(f"hf-ptq {__version__}")
        return 0
    if options.show_list:
        typer.echo("\n".join(_listing()))
        return 0
    config, problems = to_config(options)

    from hf_ptq.preflight import preflight

    preflight(config, problems)

    if launch.rank:  # rank 0 speaks; what others find goes into its report
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
    from hf_ptq.run import run

    run(config)
    if launch.world_size > 1:
        # About one in thirty interpreters that had used gloo aborted in its own exit, after everything was done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def to_config(options: Options) -> tuple[RunConfig, list[Problem]]:
    """The options as a `RunConfig`, and what is wrong with their text.

    A value that cannot be read is replaced by its default, so that everything else can still be checked.
    """
    problems: list[Problem] = []

    def read(flag: str, parse: Callable[[str], Parsed], text: str | None, default: Parsed) -> Parsed:
        if text is None:
            return default
        try:
            return parse(text)
        except UserError as error:
            problems.extend(Problem(f"{flag}: {problem.what}", problem.cure) for problem in error.problems)
            return default

    named = {"--qformat": options.qformat, "--recipe": options.recipe, "--export_fmt": options.export_fmt}
    empty = [flag for flag, text in named.items() if text is not None and not text.strip()]
    problems += [Problem(f"{flag} is empty", "give a name that --list shows, or leave it out") for flag in empty]
    if options.recipe and options.qformat:
        both = f"--recipe {options.recipe} and --qformat {options.qformat} both say what is quantized with what"
        problems.append(Problem(both, "give one of them"))
    export_fmt, found = _export_fmt(options)
    problems += found
    config = RunConfig(
        model=options.model or "",
        export_path=options.export_path.expanduser(),
        revision=options.revision,
        qformat=options.qformat or RunConfig.qformat,
        kv_cache_qformat=options.kv_cache_qformat,
        recipe=options.recipe,
        export_fmt=export_fmt,
        overwrite=options.overwrite,
        max_shard_bytes=read("--max_shard_size", parse_size, options.max_shard_size, RunConfig.max_shard_bytes),
        durable=options.durable,
        datasets=read("--dataset", parse_names, options.dataset, ()),
        calib_sizes=read("--calib_size", parse_counts, options.calib_size, ()),
        calib_seq=options.calib_seq,
        batch_size=options.batch_size,
        device=options.device,
        attn_implementation=options.attn_implementation,
        experts_implementation=options.experts_implementation,
        ep_degree=options.ep_degree,
        dense=options.dense,
        use_fsdp2=options.use_fsdp2,
        timeout_minutes=options.timeout_minutes,
        use_seq_device_map=options.use_seq_device_map,
        gpu_max_mem_percentage=options.gpu_max_mem_percentage,
        max_gpu_memory_gb=options.max_gpu_memory_gb,
        max_cpu_memory_gb=options.max_cpu_memory_gb,
        offload_folder=options.offload_folder and options.offload_folder.expanduser(),
        report_html=options.report_html,
        trust_remote_code=options.trust_remote_code,
        skip_generate=options.skip_generate,
        dry_run=options.dry_run,
        verbose=options.verbose,
        seed=options.seed,
    )
    return config, problems


def _export_fmt(options: Options) -> tuple[str, list[Problem]]:
    """The layout that two options name, and what is wrong where they name two."""
    asked = options.export_fmt and EXPORT_ALIASES.get(options.export_fmt, options.export_fmt)
    if not options.vllm_fakequant_export:
        return asked or RunConfig.export_fmt, []
    both = f"--export_fmt {options.export_fmt} and --vllm_fakequant_export name two layouts"
    return "fakequant", [] if asked in (None, "fakequant") else [Problem(both, "give one of them")]


def _with_underscores(name: str) -> str:
    return name[:2] + name[2:].replace("-", "_")


def _command() -> Any:
    app = typer.Typer(add_completion=False)
    settings = {"token_normalize_func": lambda name: name.replace("-", "_"), "help_option_names": ["-h", "--help"]}
    app.command(name="hf-ptq", help=HELP, context_settings=settings)(Options)
    return typer.main.get_command(app)


def _read(words: Sequence[str]) -> Options | None:
    """The options, or None when typer has answered by itself (--help). Raises `UserError` for text it cannot read."""
    command = _command()
    refuse_if_any(_unknown_words(words, command.params))
    # typer brings its own click or imports the one installed, by its version; either way this is click's UsageError.
    usage_error = cast("type[Exception]", typer.BadParameter.__mro__[1])
    try:
        options = command.main(args=list(words), prog_name="hf-ptq", standalone_mode=False)
    except usage_error as error:
        raise UserError(Problem(cast("typer.BadParameter", error).format_message(), "see hf-ptq --help")) from error
    return options if isinstance(options, Options) else None


def _unknown_words(words: Sequence[str], params: Sequence[Any]) -> Iterator[Problem]:
    """A problem for each word that is no option and no option's value."""
    declared = {name: not param.is_flag for param in params for name in (*param.opts, *param.secondary_opts)}
    declared |= {"-h": False, "--help": False}
    takes_value = {_with_underscores(name): value for name, value in declared.items()}
    rest = iter(words)
    after_unknown = False
    for word in rest:
        name, has_value, _ = word.partition("=")
        name = _with_underscores(name)
        if not word.startswith("-") or word == "-":
            if not after_unknown:  # else it may be that option's value
                yield Problem(f"{word!r} belongs to no option", "options are written --name value; see hf-ptq --help")
            continue
        after_unknown = name not in takes_value and not has_value
        if name not in takes_value:
            yield _unknown_option(name, list(declared))
        elif takes_value[name] and not has_value:
            next(rest, None)


def _unknown_option(name: str, known: Sequence[str]) -> Problem:
    if name in NOT_BUILT:
        return Problem(f"{name} (a flag of ModelOpt's hf_ptq.py) is not built: {NOT_BUILT[name]}")
    near = difflib.get_close_matches(name, known, 3, 0.6)
    return Problem(f"there is no option {name}", f"nearest: {', '.join(near)}" if near else "see hf-ptq --help")


def _listing() -> Iterator[str]:
    """The lines of --list."""
    from hf_ptq.data.datasets import DATASETS
    from hf_ptq.export.support import list_support
    from hf_ptq.quantization.formats.description import FORMATS
    from hf_ptq.quantization.recipe import (
        DEFAULT_KV,
        RECIPES_DIR,
        list_kv_presets,
        list_models,
        list_not_built,
        list_presets,
    )

    roles = {"weight": "weights", "input": "inputs", "kv": "keys and values"}
    groups = {
        "Presets (--qformat)": _marked(list_presets(), RunConfig.qformat),
        "Presets of ModelOpt that are refused": list_not_built(),
        "KV-cache presets (--kv_cache_qformat)": _marked(list_kv_presets(), DEFAULT_KV),
        "Model recipes (--recipe)": list_models(),
        "Recipes of your own (--recipe FILE)": [(str(RECIPES_DIR), "the shipped files, to copy and change")],
        "Number formats (in the rules of a recipe)": [
            (name, f"{', '.join(roles[role] for role in fmt.roles)}: {fmt.description}")
            for name, fmt in FORMATS.items()
        ],
        f"Layouts (--export_fmt, default {RunConfig.export_fmt}) and their formats, with who takes them": (
            list_support()
        ),
        "Data sets (--dataset)": [(name, spec.description) for name, spec in DATASETS.items()],
    }
    for title, entries in groups.items():
        width = max((len(name) for name, _ in entries), default=0)
        yield from (title, *(f"  {name:<{width}}  {text}" for name, text in entries), "")


def _marked(entries: Sequence[tuple[str, str]], default: str) -> list[tuple[str, str]]:
    return [(name, f"{text} (default)" if name == default else text) for name, text in entries]
