"""Trains a Transformer, or uses one.

    python main.py --config=configs/quickstart.py --workdir=runs/quickstart
    python main.py --mode=translate --workdir=runs/quickstart < in.txt > out.txt

Standard output carries results only. Exit codes: 0 done, 2 bad arguments, config or input, 3 stopped early but
resumable, 4 bad numbers or damaged data, 1 a bug of ours.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import re
import sys
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from t2t_jax import huge_pages, signals
from t2t_jax.errors import InputError, exit_code_of
from t2t_jax.files import flat

# Each mode imports what it needs, so that a mistyped flag is answered at once.


def train(args: flags.FlagValues) -> None:
    config, workdir = required(args, "config"), required(args, "workdir")
    profile_steps = number_range("profile_steps", args.profile_steps)
    with joined_processes(args, config.machine.peer_timeout_seconds):
        from t2t_jax.training.loop import train

        train(config, workdir, profile_steps)


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

# The flags of each mode besides --mode and --help; any other that is given is refused.
FLAGS_OF = {
    "train": ("config", "workdir", "profile_steps", "distributed", *_PROCESS),
    "prepare": ("config",),
    "evaluate": ("workdir", "step", "source", "reference", "output", "dtype", *_DECODE),
    "translate": ("workdir", "step", "output_format", "sample", *_DECODE, *_SEARCH, *_SAMPLING),
    "score": ("workdir", "step", "source", "target", "dtype"),
    "average": ("workdir", "last", "steps"),
    "export": ("workdir", "step", "format", "output"),
}
# Flags that do nothing without another.
_NEEDS = dict.fromkeys(("seed", *_SAMPLING), "sample") | {"diversity": "groups"}


def define_flags(argv: list[str]) -> flags.FlagValues:
    """All flags, not yet parsed; those of the config are the fields of the one that `argv` names."""
    args = flags.FlagValues()
    by_default = "by default the run's own"
    config_flags.DEFINE_config_file(
        "config", None, "An experiment of configs/; --config.SECTION.FIELD=VALUE changes it.", flag_values=args,
        sys_argv=argv,
    )  # fmt: skip
    define = {
        flags.DEFINE_string: {
            "workdir": (None, "RUN, the folder of a run; RUN1,RUN2 is an ensemble, for translate, score and evaluate."),
            "source": (None, "A text file, one sentence a line."),
            "target": (None, "Its translations, for --mode=score."),
            "reference": (None, "Its reference translations, for --mode=evaluate."),
            "output": (
                None,
                "Where --mode=evaluate writes its scores instead of RUN/evaluations; --mode=export's folder.",
            ),
            "format": (None, "What --mode=export writes: marian, ctranslate2 or safetensors."),
            "profile_steps": (None, "Trace these steps of training to RUN/profile: first,last."),
            "coordinator": (None, "HOST:PORT of process 0, where several processes train one run."),
            "steps": (None, "Average the checkpoints at these steps: a,b,c."),
            "step": (None, "A checkpoint's number, last or averaged; by default averaged if there is one, else last."),
            "target_prefix": (None, "A text file: how the translation of each line begins."),
        },
        flags.DEFINE_integer: {
            "num_processes": (None, "How many processes train the run."),
            "process_id": (None, "Which of them this one is, from 0."),
            "last": (None, "Average this many of the newest checkpoints."),
            "n_best": (1, "Translations of each sentence."),
            "min_length": (0, "Subwords a translation has at least, EOS included."),
            "no_repeat_ngram": (0, "No so many subwords in a row twice; 0: as the model likes."),
            "groups": (1, "Groups of a diverse beam; must divide --beam_size."),
            "top_k": (0, "Sample from this many of the likeliest subwords; 0: from all."),
            "seed": (0, "Of --sample; the same seed and sentence give the same samples."),
            "beam_size": (None, f"Beam width; {by_default}."),
            "max_extra_length": (None, f"Subwords a translation may have beyond its source's; {by_default}."),
        },
        flags.DEFINE_float: {
            "alpha": (None, f"Length penalty; {by_default}."),
            "diversity": (0.5, "How much a group avoids what the groups before it say."),
            "temperature": (1.0, "Of --sample: probabilities to the power of 1/temperature."),
            "top_p": (1.0, "Sample from the fewest subwords that together have this probability."),
        },
    }
    for kind, described in define.items():
        for name, (default, text) in described.items():
            kind(name, default, text, flag_values=args)
    flags.DEFINE_enum("mode", "train", list(MODES), "What to do.", flag_values=args)
    flags.DEFINE_enum("output_format", "text", ["text", "jsonl"], "Of --mode=translate.", flag_values=args)
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "What to compute in: float32; for evaluate, the run's evaluate.dtype.",
        flag_values=args,
    )  # fmt: skip
    flags.DEFINE_boolean(
        "distributed", False, "One of several processes, as Slurm or the cloud's manager says.", flag_values=args
    )
    flags.DEFINE_boolean("sample", False, "Draw --n_best samples instead of searching.", flag_values=args)
    flags.DEFINE_boolean("help", False, "Show this.", short_name="h", flag_values=args)
    return args


def parse(argv: list[str]) -> flags.FlagValues:
    """The flags; whatever is wrong with them, or with the config file, is one line."""
    argv = join_config(argv)
    path = config_path(argv)
    if absl_own := [arg for arg in argv[1:] if re.match("--?(flagfile|undefok)", arg)]:
        raise InputError(f"{absl_own[0]}: no such flag; --help lists all")
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # of what ml_collections says beside its exceptions
    try:
        args = define_flags(argv)
        extra = args(argv)[1:]
    except flags.Error as error:
        raise InputError(unknown_field(argv) or one_line(error)) from error
    except (Exception, SystemExit) as error:  # a config is a program: anything may go wrong in it
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
    """`argv` with `--config FILE` as `--config=FILE`."""
    joined, rest = [], iter(argv)
    for arg in rest:
        value = next(rest, None) if re.fullmatch("--?config", arg) else None
        joined.append(arg if value is None else f"--config={value}")
    return joined


def config_path(argv: list[str]) -> str | None:
    """The config file that `argv` names, if any."""
    paths = [arg.partition("=")[2] for arg in argv if re.match("--?config=", arg)]
    if len(paths) > 1:
        raise InputError(f"--config={paths[1]}: --config is given {len(paths)} times; give it once")
    if paths and not os.path.isfile(paths[0]):
        raise InputError(f"--config={paths[0]}: no such file; the experiments are in configs/")
    return paths[0] if paths else None


def check_config(path: str, config: Any) -> None:
    """Refuses what is no config, or has not the fields of base_ende.py with values of their types."""
    from configs import base_ende

    if not isinstance(config, ConfigDict):
        raise InputError(f"--config={path}: get_config() must return a ConfigDict; got {type(config).__name__}")
    known, given = flat(base_ende.get_config().to_dict()), flat(config.to_dict())
    for field in sorted(known.keys() ^ given.keys()):
        raise InputError(f"--config={path}: {field} is {'missing' if field in known else 'no field'}; begin with "
                         "configs.base_ende.get_config(), which defines every field")  # fmt: skip
    for field, value in given.items():
        kind = type(known[field])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise InputError(f"--config={path}: {field} must be of type {kind.__name__}; got {value!r}")


def refuse_unused(args: flags.FlagValues) -> None:
    """Refuses flags that are given and that the mode does not use."""
    given = {name.partition(".")[0] for name in args if args[name].present} - {"mode", "help", "h"}
    for name in sorted(given):
        if name not in FLAGS_OF[args.mode]:
            modes = " or ".join(mode for mode, names in FLAGS_OF.items() if name in names)
            raise InputError(f"--{name} is not used by --mode={args.mode}; leave it out, it is for --mode={modes}")
        if name in _NEEDS and _NEEDS[name] not in given:
            raise InputError(f"--{name} does nothing without --{_NEEDS[name]}; give both or neither")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def unknown_field(argv: list[str]) -> str | None:
    """What is wrong with the first --config.SECTION.FIELD that no config has, if there is one."""
    from configs import base_ende

    known = [f"--config.{field}" for field in flat(base_ende.get_config().to_dict())]
    given = [arg.partition("=")[0] for arg in argv if arg.startswith("--config.")]
    if given and not any(arg.startswith("--config=") for arg in argv):
        return f"{given[0]} changes a config; name that too, for example --config=configs/quickstart.py"
    unknown = [flag for flag in given if flag not in known]
    if not unknown:
        return None
    near = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{unknown[0]}: no such field; {hint}configs/base_ende.py defines every field"


def required(args: flags.FlagValues, name: str) -> Any:
    """The value of a flag that this mode cannot do without."""
    if args[name].value in (None, ""):
        example = {"config": "configs/quickstart.py", "workdir": "runs/quickstart", "format": "ctranslate2"}.get(
            name, "FILE"
        )
        raise InputError(f"--mode={args.mode} needs --{name}, for example --{name}={example}")
    return args[name].value


def joined_processes(args: flags.FlagValues, timeout_seconds: float) -> contextlib.AbstractContextManager[None]:
    """Makes this process one of several, if the flags say so."""
    given = [args[name].value for name in _PROCESS]
    if not args.distributed and all(value is None for value in given):
        return contextlib.nullcontext()
    from t2t_jax import sharding

    return sharding.joined_processes(*given, timeout_seconds)


def decode_options(args: flags.FlagValues) -> dict[str, Any]:
    """The options of decoding; None where the run's own hold."""
    return {name: args[name].value for name in _DECODE}


def number_range(name: str, value: str | None) -> tuple[int, int] | None:
    """The two numbers of first,last."""
    if value is None:
        return None
    numbers = step_numbers(value)
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise InputError(f"--{name}={value}: must be first,last, as in 10,12")
    return numbers[0], numbers[1]


def checkpoint(step: str | None) -> int | str | None:
    """The number of a checkpoint, or its name."""
    if step in (None, "last", "averaged"):
        return step
    if not re.fullmatch("[0-9]{1,18}", step):
        raise InputError(f"--step={step}: must be the number of a checkpoint, last or averaged")
    return int(step)


def step_list(value: str | None) -> list[int] | None:
    """The numbers of a,b,c, each once."""
    if value is None:
        return None
    numbers = step_numbers(value)
    if not numbers or len(set(numbers)) < len(numbers):
        raise InputError(f"--steps={value}: must be different step numbers with commas between, as in 1000,2000")
    return numbers


def step_numbers(text: str) -> list[int]:
    """The numbers with commas between them; none where the text is anything else."""
    return [int(part) for part in text.split(",")] if re.fullmatch("[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*", text) else []


def keep_compiled_programs() -> None:
    """Lets JAX, once imported, find what it has compiled before, in the user's cache; JAX's own variables go first."""
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
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    huge_pages.ask()
    signals.watch()
    sys.exit(main(sys.argv))
