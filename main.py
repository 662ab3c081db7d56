"""Trains a Transformer, and translates, evaluates, scores, averages and exports with a trained one.

    python main.py --config=configs/quickstart.py --workdir=runs/quickstart
    python main.py --mode=translate --workdir=runs/quickstart < in.txt > out.txt

Standard output carries results only. Exit codes: 0 done; 1 a bug in this code; 2 bad arguments, config or input;
3 stopped early, the same command resumes; 4 NaN or infinity, or damaged files.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import re
import shlex
import sys
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from t2t_jax import huge_pages, signals
from t2t_jax.errors import InputError, exit_code_of
from t2t_jax.files import flat

# Each mode imports what it needs, so that a mistyped flag is reported before JAX is loaded.


def train(args: flags.FlagValues) -> None:
    config, workdir = required(args, "config"), required(args, "workdir")
    profile_steps = number_range("profile_steps", args.profile_steps)
    with joined_processes(args, config.machine.peer_timeout_seconds):
        from t2t_jax import sharding
        from t2t_jax.training.loop import train

        train(config, workdir, profile_steps)
        if sharding.is_main():
            command = f"python main.py --mode=translate --workdir={shlex.quote(workdir)}"
            print(f'next: echo "…" | {command}', file=sys.stderr)


def prepare(args: flags.FlagValues) -> None:
    config = required(args, "config")
    from t2t_jax.data.preparation import open_store

    print(open_store(config.data).describe())


def evaluate(args: flags.FlagValues) -> None:
    workdir = required(args, "workdir")
    from t2t_jax.evaluation.evaluate import evaluate_run

    given = {name: args[name].value for name in ("source", "reference", "output", "dtype")}
    print(json.dumps(evaluate_run(workdir, step=checkpoint(args.step), **given, **decode_options(args)), indent=2))


def translate(args: flags.FlagValues) -> None:
    workdir = required(args, "workdir")
    from t2t_jax.decoding.sampling import Sampling
    from t2t_jax.decoding.stream import translate_run

    sampling = Sampling(*(args[name].value for name in _SAMPLING)) if args.sample else None
    options = decode_options(args) | {name: args[name].value for name in (*_SEARCH, "output_format")}
    step = checkpoint(args.step)
    translate_run(workdir, sys.stdin.buffer, sys.stdout, sampling=sampling, step=step, **options)


def score(args: flags.FlagValues) -> None:
    workdir, source, target = (required(args, name) for name in ("workdir", "source", "target"))
    from t2t_jax.decoding.translator import load, score_files

    translator = load(workdir, checkpoint(args.step), dtype=args.dtype or "float32")
    for score in score_files(translator, source, target):
        print(json.dumps(dataclasses.asdict(score)))


def average(args: flags.FlagValues) -> None:
    workdir = required(args, "workdir")
    from t2t_jax.checkpoints import average_run
    from t2t_jax.run_folder import RunFolder

    run = RunFolder.open(workdir)
    done = average_run(run.checkpoints, run.averaged, last=args.last, steps=step_list(args.steps))
    print(f"{run.averaged}/{done.step}: average of {done.metadata['averaged_steps']}")


def export(args: flags.FlagValues) -> None:
    workdir, format, output = (required(args, name) for name in ("workdir", "format", "output"))
    from t2t_jax.interop.export import export_run

    export_run(workdir, format=format, output=output, step=checkpoint(args.step))


MODES = {mode.__name__: mode for mode in (train, prepare, evaluate, translate, score, average, export)}

_PROCESS = ("coordinator", "num_processes", "process_id")
_DECODE = ("beam_size", "alpha", "max_extra_length")
_SEARCH = ("n_best", "min_length", "no_repeat_ngram", "groups", "diversity", "target_prefix", "seed", "dtype")
_SAMPLING = ("temperature", "top_k", "top_p")

# The flags of each mode besides --mode and --help; a flag that the mode does not use is refused.
FLAGS_OF = {
    "train": ("config", "workdir", "profile_steps", "distributed", *_PROCESS),
    "prepare": ("config",),
    "evaluate": ("workdir", "step", "source", "reference", "output", "dtype", *_DECODE),
    "translate": ("workdir", "step", "output_format", "sample", *_DECODE, *_SEARCH, *_SAMPLING),
    "score": ("workdir", "step", "source", "target", "dtype"),
    "average": ("workdir", "last", "steps"),
    "export": ("workdir", "step", "format", "output"),
}
# The flag without which each of these has no effect.
_NEEDS = dict.fromkeys(("seed", *_SAMPLING), "sample") | {"diversity": "groups"}


def define_flags(argv: list[str]) -> flags.FlagValues:
    """Defines all flags, unparsed; --config.SECTION.FIELD exists for each field of the config file in `argv`."""
    args = flags.FlagValues()
    by_default = "default: that of the run's config"
    config_flags.DEFINE_config_file(
        "config", None, "A config file, such as configs/base_ende.py; --config.SECTION.FIELD=VALUE overrides a field.",
        flag_values=args, sys_argv=argv,
    )  # fmt: skip
    define = {
        flags.DEFINE_string: {
            "workdir": (None, "Run folder; translate, score and evaluate take an ensemble as RUN1,RUN2."),
            "source": (None, "Source text file, one sentence a line."),
            "target": (None, "Target text file of --mode=score, line by line the translation of --source."),
            "reference": (None, "Reference translations of --source, for --mode=evaluate."),
            "output": (
                None,
                "Where --mode=evaluate writes its scores, default RUN/evaluations; the new folder of --mode=export.",
            ),
            "format": (None, "Format of --mode=export: marian, ctranslate2 or safetensors."),
            "profile_steps": (None, "Write a profiler trace of these training steps to RUN/profile: first,last."),
            "coordinator": (None, "HOST:PORT of process 0, where several processes train one run."),
            "steps": (None, "Average the checkpoints at these steps: a,b,c."),
            "step": (None, "Checkpoint: its step, last or averaged; default: averaged if there is one, else last."),
            "target_prefix": (None, "Text file whose lines are forced as the beginnings of the translations."),
        },
        flags.DEFINE_integer: {
            "num_processes": (None, "Number of processes that train the run."),
            "process_id": (None, "Index of this process, from 0."),
            "last": (None, "Average this many of the newest checkpoints."),
            "n_best": (1, "Number of translations printed for each sentence."),
            "min_length": (0, "Minimum number of subwords of a translation, EOS included."),
            "no_repeat_ngram": (0, "Block repeated n-grams of this size; 0: off."),
            "groups": (1, "Number of groups of diverse beam search; must divide --beam_size."),
            "top_k": (0, "Sample from the k most probable subwords; 0: from all."),
            "seed": (0, "Random seed of --sample; the same seed and sentence give the same samples."),
            "beam_size": (None, f"Beam size; {by_default}."),
            "max_extra_length": (None, f"Maximum subwords of a translation beyond the source length; {by_default}."),
        },
        flags.DEFINE_float: {
            "alpha": (None, f"Length penalty α; {by_default}."),
            "diversity": (0.5, "Diverse beam search: penalty for each time that earlier groups chose a token."),
            "temperature": (1.0, "Softmax temperature of --sample."),
            "top_p": (1.0, "Nucleus sampling: from the fewest subwords whose probabilities sum to p."),
        },
    }
    for kind, described in define.items():
        for name, (default, text) in described.items():
            kind(name, default, text, flag_values=args)
    flags.DEFINE_enum("mode", "train", list(MODES), "What to do; flags it does not use are refused.", flag_values=args)
    flags.DEFINE_enum("output_format", "text", ["text", "jsonl"], "Of --mode=translate.", flag_values=args)
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"],
        "Arithmetic of the model; default: float32, for evaluate the config's evaluate.dtype.", flag_values=args,
    )  # fmt: skip
    flags.DEFINE_boolean(
        "distributed", False, "Join the processes that Slurm or another cluster manager started.", flag_values=args
    )
    flags.DEFINE_boolean("sample", False, "Draw --n_best samples instead of beam search.", flag_values=args)
    flags.DEFINE_boolean("help", False, "Show this help.", short_name="h", flag_values=args)
    return args


def parse(argv: list[str]) -> flags.FlagValues:
    """The parsed flags; any mistake in them or in the config file is an InputError of one line."""
    argv = join_config(argv)
    path = config_path(argv)
    if absl_own := [arg for arg in argv[1:] if re.match("--?(flagfile|undefok)", arg)]:
        raise InputError(f"{absl_own[0]}: no such flag; --help lists all")
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # ml_collections also logs what it raises
    try:
        args = define_flags(argv)
        extra = args(argv)[1:]
    except flags.Error as error:
        raise InputError(unknown_field(argv) or one_line(error)) from error
    except (Exception, SystemExit) as error:  # a config file is a program and may raise anything
        reason = f"--config={path}: {type(error).__name__}: {one_line(error)}"
        raise InputError(unknown_field(argv) or reason) from error
    finally:
        logging.set_verbosity(verbosity)
    if extra:
        raise InputError(f"unexpected argument {extra[0]!r}; options start with --")
    if path is not None:
        check_config(path, args.config)
    return args


def join_config(argv: list[str]) -> list[str]:
    """Rewrites `--config FILE` in `argv` as `--config=FILE`."""
    joined, rest = [], iter(argv)
    for arg in rest:
        value = next(rest, None) if re.fullmatch("--?config", arg) else None
        joined.append(arg if value is None else f"--config={value}")
    return joined


def config_path(argv: list[str]) -> str | None:
    """The path of the config file in `argv`, if any."""
    paths = [arg.partition("=")[2] for arg in argv if re.match("--?config=", arg)]
    if len(paths) > 1:
        raise InputError(f"--config={paths[1]}: --config is given {len(paths)} times; give it once")
    if paths and not os.path.isfile(paths[0]):
        raise InputError(f"--config={paths[0]}: no such file; see configs/")
    return paths[0] if paths else None


def check_config(path: str, config: Any) -> None:
    """Refuses a config whose fields or types of values differ from those of configs/base_ende.py."""
    from configs import base_ende

    if not isinstance(config, ConfigDict):
        raise InputError(f"--config={path}: get_config() must return a ConfigDict; got {type(config).__name__}")
    known, given = flat(base_ende.get_config().to_dict()), flat(config.to_dict())
    for field in sorted(known.keys() ^ given.keys()):
        raise InputError(f"--config={path}: {field} is {'missing' if field in known else 'no field'}; start "
                         "from configs.base_ende.get_config(), which defines every field")  # fmt: skip
    for field, value in given.items():
        kind = type(known[field])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise InputError(f"--config={path}: {field} must be of type {kind.__name__}; got {value!r}")


def refuse_unused(args: flags.FlagValues) -> None:
    """Refuses flags that the mode does not use."""
    given = {name.partition(".")[0] for name in args if args[name].present} - {"mode", "help", "h"}
    for name in sorted(given):
        if name not in FLAGS_OF[args.mode]:
            modes = " or ".join(mode for mode, names in FLAGS_OF.items() if name in names)
            raise InputError(f"--{name} is not used by --mode={args.mode}; it is for --mode={modes}")
        if name in _NEEDS and _NEEDS[name] not in given:
            raise InputError(f"--{name} has no effect without --{_NEEDS[name]}; give both or neither")


def one_line(error: BaseException) -> str:
    """The message of an error, on one line."""
    return " ".join(str(error).split())


def unknown_field(argv: list[str]) -> str | None:
    """The message about the first --config.SECTION.FIELD that no config has, if there is one."""
    from configs import base_ende

    known = [f"--config.{field}" for field in flat(base_ende.get_config().to_dict())]
    given = [arg.partition("=")[0] for arg in argv if arg.startswith("--config.")]
    if given and not any(arg.startswith("--config=") for arg in argv):
        return (
            f"{given[0]} overrides a field of a config; give --config too, for example --config=configs/quickstart.py"
        )
    unknown = [flag for flag in given if flag not in known]
    if not unknown:
        return None
    near = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{unknown[0]}: no such field; {hint}configs/base_ende.py defines every field"


def required(args: flags.FlagValues, name: str) -> Any:
    """The value of a flag that this mode requires."""
    if args[name].value in (None, ""):
        example = {"config": "configs/quickstart.py", "workdir": "runs/quickstart", "format": "ctranslate2"}.get(
            name, "FILE"
        )
        raise InputError(f"--mode={args.mode} needs --{name}, for example --{name}={example}")
    return args[name].value


def joined_processes(args: flags.FlagValues, timeout_seconds: float) -> contextlib.AbstractContextManager[None]:
    """Joins the other processes of the run, if the flags say that there are any."""
    given = [args[name].value for name in _PROCESS]
    if not args.distributed and all(value is None for value in given):
        return contextlib.nullcontext()
    from t2t_jax import sharding

    return sharding.joined_processes(*given, timeout_seconds)


def decode_options(args: flags.FlagValues) -> dict[str, Any]:
    """The decoding options that the flags override; None for those of the run's config."""
    return {name: args[name].value for name in _DECODE}


def number_range(name: str, value: str | None) -> tuple[int, int] | None:
    """Parses first,last."""
    if value is None:
        return None
    numbers = step_numbers(value)
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise InputError(f"--{name}={value}: must be first,last, as in 10,12")
    return numbers[0], numbers[1]


def checkpoint(step: str | None) -> int | str | None:
    """Parses --step: a step number, last or averaged."""
    if step in (None, "last", "averaged"):
        return step
    if not re.fullmatch("[0-9]{1,18}", step):
        raise InputError(f"--step={step}: must be the step of a checkpoint, last or averaged")
    return int(step)


def step_list(value: str | None) -> list[int] | None:
    """Parses a,b,c; each number at most once."""
    if value is None:
        return None
    numbers = step_numbers(value)
    if not numbers or len(set(numbers)) < len(numbers):
        raise InputError(f"--steps={value}: must be different step numbers separated by commas, as in 1000,2000")
    return numbers


def step_numbers(text: str) -> list[int]:
    """Positive numbers separated by commas; an empty list for any other text."""
    return [int(part) for part in text.split(",")] if re.fullmatch("[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*", text) else []


def keep_compiled_programs() -> None:
    """Turns on JAX's persistent compilation cache, in the user's cache folder, unless JAX's variables are set."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(cache, "t2t_jax", "compiled"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def main(argv: list[str]) -> int:
    keep_compiled_programs()

    def run() -> None:
        args = parse(argv)
        if args.help:
            print(__doc__, args.get_help(), sep="\n")
        else:
            refuse_unused(args)
            MODES[args.mode](args)

    try:
        return exit_code_of(run)
    except BrokenPipeError:  # the program that reads our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    huge_pages.enable()
    signals.watch()
    sys.exit(main(sys.argv))
