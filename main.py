"""Trains a Transformer, or uses one.

    python main.py --config=configs/quickstart.py --workdir=runs/quickstart
    python main.py --mode=translate --workdir=runs/quickstart < in.txt > out.txt

Standard output carries results only. Exit codes: 0 done, 2 bad arguments, config or input, 3 stopped early but
resumable, 4 bad numbers or damaged data, 1 a bug of ours.
"""

import dataclasses
import difflib
import json
import os
import sys

from absl import flags
from ml_collections import config_flags

from t2t_jax.errors import InputError, StopError

# Each mode imports what it needs, so that a mistyped flag is answered at once.


def train() -> None:
    from t2t_jax.training.loop import train

    train(required("config"), required("workdir"))


def prepare() -> None:
    from t2t_jax.data.token_store import open_store

    print(open_store(required("config").data).describe())


def evaluate() -> None:
    from t2t_jax.evaluation.evaluate import evaluate_run

    files = {name: FLAGS[name].value for name in ("step", "source", "reference", "output")}
    print(json.dumps(evaluate_run(required("workdir"), **files, options=decode_options()), indent=2))


def translate() -> None:
    from t2t_jax.decoding.stream import translate_stream
    from t2t_jax.decoding.translator import load
    from t2t_jax.run_folder import RunFolder

    options = RunFolder.open(required("workdir")).config["decode"]
    options |= {name: value for name, value in decode_options().items() if value is not None}
    translator = load(FLAGS.workdir, FLAGS.step)
    translate_stream(
        translator, sys.stdin.buffer, sys.stdout, output_format=FLAGS.output_format, n_best=FLAGS.n_best, **options
    )


def score() -> None:
    from t2t_jax.decoding.translator import load, score_files

    for score in score_files(load(required("workdir"), FLAGS.step), required("source"), required("target")):
        print(json.dumps(dataclasses.asdict(score)))


def average() -> None:
    from t2t_jax.checkpoints import average_run
    from t2t_jax.run_folder import RunFolder

    run = RunFolder.open(required("workdir"))
    done = average_run(run.checkpoints, run.averaged, last=FLAGS.last, steps=FLAGS.steps and [*map(int, FLAGS.steps)])
    print(f"{run.averaged}/{done.step}: average of {done.metadata['averaged_steps']}")


MODES = {f.__name__: f for f in (train, prepare, evaluate, translate, score, average)}

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file("config", None, "The experiment, a file in configs/; --config.SECTION.FIELD=VALUE changes it.")
flags.DEFINE_enum("mode", "train", list(MODES), "What to do.")
flags.DEFINE_string("workdir", None, "RUN, the folder of a run.")
flags.DEFINE_integer("step", None, "The checkpoint; by default the averaged one if there is one, else the last.")
flags.DEFINE_integer("beam_size", None, "Beam width; by default the run's.")
flags.DEFINE_float("alpha", None, "Length penalty; by default the run's.")
flags.DEFINE_integer("max_extra_length", None, "Subwords a translation may have beyond its source's; by default the run's.")
flags.DEFINE_integer("n_best", 1, "Translations of each sentence.")
flags.DEFINE_enum("output_format", "text", ["text", "jsonl"], "Of --mode=translate.")
flags.DEFINE_string("source", None, "A text file, one sentence a line.")
flags.DEFINE_string("target", None, "Its translations, to score.")
flags.DEFINE_string("reference", None, "Its reference translations, to evaluate against.")
flags.DEFINE_string("output", None, "Where --mode=evaluate writes its scores instead of result.json.")
flags.DEFINE_integer("last", None, "Average this many of the newest checkpoints.")
flags.DEFINE_list("steps", None, "Average the checkpoints at these steps: a,b,c.")


def required(flag: str):
    """The value of a flag that this mode cannot do without."""
    if FLAGS[flag].value is None:
        example = {"config": "configs/quickstart.py", "workdir": "runs/quickstart"}.get(flag, "FILE")
        raise InputError(f"--mode={FLAGS.mode} needs --{flag}, for example --{flag}={example}")
    return FLAGS[flag].value


def decode_options() -> dict[str, float | None]:
    """The options of decoding that were given; None where the run's own hold."""
    return {name: FLAGS[name].value for name in ("beam_size", "alpha", "max_extra_length")}


def parse(argv: list[str]) -> None:
    """Parses the flags; whatever is wrong with them, or with the config file, is one line."""
    path = next((arg.partition("=")[2] for arg in argv if arg.startswith("--config=")), None)
    if path is not None and not os.path.isfile(path):
        raise InputError(f"--config={path}: no such file; the experiments are in configs/")
    try:
        extra = FLAGS(argv)[1:]
    except (flags.Error, AttributeError, KeyError) as error:
        raise InputError(unknown_field(argv) or one_line(error)) from error
    except Exception as error:
        raise InputError(f"--config={path}: {type(error).__name__}: {one_line(error)}") from error
    if extra:
        raise InputError(f"unexpected argument {extra[0]!r}; options start with --")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def unknown_field(argv: list[str]) -> str | None:
    """What is wrong with the first --config.SECTION.FIELD that no config has, if there is one."""
    from configs import base_ende

    known = [f"--config.{section}.{field}" for section, fields in base_ende.get_config().items() for field in fields]
    given = [arg.partition("=")[0] for arg in argv if arg.startswith("--config.")]
    if given and not any(arg.startswith("--config=") for arg in argv):
        return f"{given[0]} changes a config; name that too, for example --config=configs/quickstart.py"
    unknown = [flag for flag in given if flag not in known]
    if not unknown:
        return None
    near = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{unknown[0]}: no such field; {hint}configs/base_ende.py defines every field"


def main(argv: list[str]) -> int:
    try:
        parse(argv)
        MODES[FLAGS.mode]()
    except StopError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 3
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
