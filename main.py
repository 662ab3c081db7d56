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
import sys
from typing import Any

from absl import flags
from ml_collections import config_flags

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
    from t2t_jax.data.token_store import open_store

    print(open_store(config.data).describe())


def evaluate(args: flags.FlagValues) -> None:
    workdir = required(args, "workdir")
    from t2t_jax.evaluation.evaluate import evaluate_run

    files = {name: args[name].value for name in ("source", "reference", "output")}
    print(json.dumps(evaluate_run(workdir, step=args.step, **files, **decode_options(args)), indent=2))


def translate(args: flags.FlagValues) -> None:
    workdir = required(args, "workdir")
    from t2t_jax.decoding.sampling import Sampling
    from t2t_jax.decoding.stream import translate_run

    sampling = Sampling(args.temperature, args.top_k, args.top_p) if args.sample else None
    names = ("n_best", "min_length", "no_repeat_ngram", "groups", "diversity", "target_prefix", "seed", "dtype")
    options = decode_options(args) | {name: args[name].value for name in (*names, "output_format", "step")}
    translate_run(workdir, sys.stdin.buffer, sys.stdout, sampling=sampling, **options)


def score(args: flags.FlagValues) -> None:
    workdir, source, target = (required(args, name) for name in ("workdir", "source", "target"))
    from t2t_jax.decoding.translator import load, score_files

    for score in score_files(load(workdir, args.step), source, target):
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

    export_run(workdir, format=format, output=output, step=args.step)


MODES = {mode.__name__: mode for mode in (train, prepare, evaluate, translate, score, average, export)}


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
                "Where --mode=evaluate writes its scores instead of RUN/result.json; --mode=export's folder.",
            ),
            "format": (None, "What --mode=export writes: marian, ctranslate2 or safetensors."),
            "profile_steps": (None, "Trace these steps of training to RUN/profile: first,last."),
            "coordinator": (None, "HOST:PORT of process 0, where several processes train one run."),
            "steps": (None, "Average the checkpoints at these steps: a,b,c."),
            "target_prefix": (None, "A text file: how the translation of each line begins."),
        },
        flags.DEFINE_integer: {
            "num_processes": (None, "How many processes train the run."),
            "process_id": (None, "Which of them this one is, from 0."),
            "step": (None, "The checkpoint; by default the averaged one if there is one, else the last."),
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
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "What to compute in.", flag_values=args)
    flags.DEFINE_boolean(
        "distributed", False, "One of several processes, as Slurm or the cloud's manager says.", flag_values=args
    )
    flags.DEFINE_boolean("sample", False, "Draw --n_best samples instead of searching.", flag_values=args)
    flags.DEFINE_boolean("help", False, "Show this.", short_name="h", flag_values=args)
    return args


def parse(argv: list[str]) -> flags.FlagValues:
    """The flags; whatever is wrong with them, or with the config file, is one line."""
    path = next((arg.partition("=")[2] for arg in argv if arg.startswith("--config=")), None)
    if path is not None and not os.path.isfile(path):
        raise InputError(f"--config={path}: no such file; the experiments are in configs/")
    args = define_flags(argv)
    try:
        extra = args(argv)[1:]
    except (flags.Error, AttributeError, KeyError) as error:
        raise InputError(unknown_field(argv) or one_line(error)) from error
    except Exception as error:  # a config is a program: anything may go wrong in it
        raise InputError(f"--config={path}: {type(error).__name__}: {one_line(error)}") from error
    if extra:
        raise InputError(f"unexpected argument {extra[0]!r}; options start with --")
    return args


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
    if args[name].value is None:
        example = {"config": "configs/quickstart.py", "workdir": "runs/quickstart", "format": "ctranslate2"}.get(
            name, "FILE"
        )
        raise InputError(f"--mode={args.mode} needs --{name}, for example --{name}={example}")
    return args[name].value


def joined_processes(args: flags.FlagValues, timeout_seconds: float) -> contextlib.AbstractContextManager[None]:
    """Makes this process one of several, if the flags say so."""
    given = [args[name].value for name in ("coordinator", "num_processes", "process_id")]
    if not args.distributed and all(value is None for value in given):
        return contextlib.nullcontext()
    from t2t_jax import sharding

    return sharding.joined_processes(*given, timeout_seconds)


def decode_options(args: flags.FlagValues) -> dict[str, Any]:
    """The options of decoding; None where the run's own hold."""
    return {name: args[name].value for name in ("beam_size", "alpha", "max_extra_length")}


def number_range(name: str, value: str | None) -> tuple[int, int] | None:
    """The two numbers of first,last."""
    if value is None:
        return None
    first, _, last = value.partition(",")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise InputError(f"--{name}={value}: must be first,last, as in 10,12")
    return int(first), int(last)


def step_list(steps: str | None) -> list[int] | None:
    try:
        return steps and [int(step) for step in steps.split(",")]
    except ValueError:
        raise InputError(f"--steps={steps}: must be whole numbers with commas between, as in 1000,2000") from None


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
