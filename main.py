"""Trains a Transformer; translates, evaluates, scores, averages, exports, serves, back-translates, shows attention.

    python main.py --config=configs/quickstart.py --workdir=runs/quickstart
    python main.py --mode=translate --workdir=runs/quickstart < in.txt > out.txt

The flags of each mode: docs/command_line.md. Standard output carries results only. Exit codes: 0 done; 1 a bug in this
code; 2 bad arguments, config or input; 3 stopped early, the same command resumes; 4 NaN or infinity, or damaged files.
"""

import contextlib
import json
import os
import shlex
import sys
from typing import Any

from absl import flags

from configs import base_ende
from t2t_jax import command_line, huge_pages, signals
from t2t_jax.command_line import checkpoint, config_of, overrides_of, required, step_list, step_range
from t2t_jax.errors import InputError, exit_code_of, full_disk_named, open_standard_streams
from t2t_jax.files import cache_folder
from t2t_jax.run_folder import DECODE_FIELDS as _DECODE
from t2t_jax.run_folder import RunFolder

# Each mode imports what it needs, so that a mistyped flag is reported before JAX is loaded.


def train(args: flags.FlagValues) -> None:
    config, workdir = config_of(args), required(args, "workdir")
    profile_steps = step_range(args.profile_steps)
    with joined_processes(args, config.machine.peer_timeout_seconds):
        from t2t_jax import sharding
        from t2t_jax.training.loop import train

        train(config, workdir, profile_steps, init_from=args.init_from, overrides=overrides_of(args))
        if sharding.is_main():
            command = f"python {shlex.quote(sys.argv[0])} --mode=translate --workdir={shlex.quote(workdir)}"
            print(f'next: echo "…" | {command}', file=sys.stderr)


def prepare(args: flags.FlagValues) -> None:
    config = config_of(args)
    from t2t_jax import slurm
    from t2t_jax.data.preparation import open_store

    if args.slurm and args.launcher != "slurm":
        raise InputError(f"--slurm={args.slurm}: needs --launcher=slurm")
    on_slurm = slurm.parse_options(args.slurm) if args.launcher == "slurm" else None
    print(open_store(config.data, on_slurm).describe())


def evaluate(args: flags.FlagValues) -> None:
    required(args, "workdir")
    from t2t_jax.evaluation.evaluate import evaluate_run

    given = {name: args[name].value for name in ("split", "source", "reference", "output", "dtype", "min_length")}
    step = checkpoint(args.step)
    with run_folders(args) as run:
        scores, stored = evaluate_run(run, step=step, **given, **decode_options(args))
        print(json.dumps(scores, indent=2))  # before the upload of a remote run, which may not be permitted
    if stored:
        print(f"stored in {stored}", file=sys.stderr)


def translate(args: flags.FlagValues) -> None:
    required(args, "workdir")
    if sys.stdin is None:
        raise InputError("standard input is closed; give the sentences there, one a line, as in < FILE")
    from t2t_jax.decoding.stream import translate_run

    options = decode_options(args) | {name: args[name].value for name in (*_SEARCH, "output_format")}
    options |= {"sampling": sampling_of(args), "step": checkpoint(args.step)}
    with run_folders(args) as run, full_disk_named("standard output"):
        # Detached: Python closes sys.stdin at exit, and aborts where the thread that reads ahead waits for a line.
        translate_run(run, sys.stdin.detach(), sys.stdout, **options)


def backtranslate(args: flags.FlagValues) -> None:
    _, source, output = (required(args, name) for name in ("workdir", "source", "output"))
    from t2t_jax.decoding.back_translation import back_translate_run

    options = decode_options(args) | {name: args[name].value for name in ("tag", "seed", "dtype")}
    options |= {"sampling": sampling_of(args), "step": checkpoint(args.step)}
    with run_folders(args) as run:
        print(back_translate_run(run, source=source, output=output, **options))


def score(args: flags.FlagValues) -> None:
    _, source, target = (required(args, name) for name in ("workdir", "source", "target"))
    from t2t_jax.decoding.stream import score_run

    with run_folders(args) as run, full_disk_named("standard output"):
        score_run(run, sys.stdout, source=source, target=target, step=checkpoint(args.step), dtype=args.dtype)


def average(args: flags.FlagValues) -> None:
    workdir = required(args, "workdir")
    from t2t_jax.checkpoints import average_run
    from t2t_jax.remote_run import local_runs

    with local_runs(workdir) as folder:
        run = RunFolder.open(folder)
        final = run.config.get("train", {}).get("train_steps")  # an imported run has no such section
        done = average_run(run.checkpoints, run.averaged, last=args.last, steps=step_list(args.steps), final=final)
    print(f"{workdir.rstrip('/')}/averaged/{done.step}: average of {done.metadata['averaged_steps']}")


def export(args: flags.FlagValues) -> None:
    _, format, output = (required(args, name) for name in ("workdir", "format", "output"))
    from t2t_jax.interop.export import export_run

    with run_folders(args) as run:
        export_run(run, format=format, output=output, step=checkpoint(args.step))
    print(f"exported to {output}", file=sys.stderr)


def attention(args: flags.FlagValues) -> None:
    _, source, output = (required(args, name) for name in ("workdir", "source", "output"))
    from t2t_jax.visualization.report import attention_run

    with run_folders(args) as run:
        print(attention_run(run, source=source, target=args.target, output=output, step=checkpoint(args.step)))


def serve(args: flags.FlagValues) -> None:
    required(args, "workdir")
    try:
        from t2t_jax.serving.server import serve_run
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise InputError(f"--mode=serve needs the package {error.name}; pip install 't2t_jax[serve]'") from None

    with run_folders(args) as run:
        listening = {name: args[name].value for name in ("host", "port", "allowed_hosts")}
        serve_run(run, **listening, step=checkpoint(args.step), dtype=args.dtype)


MODES = {
    mode.__name__: mode
    for mode in (train, prepare, evaluate, translate, backtranslate, score, average, export, attention, serve)
}

_PROCESS = ("coordinator", "num_processes", "process_id")
_SEARCH = (
    "n_best", "min_length", "no_repeat_ngram", "groups", "diversity", "target_prefix", "split_sentences", "seed",
    "dtype",
)  # fmt: skip
_SAMPLING = ("temperature", "top_k", "top_p")

# The flags of each mode besides --mode and --help; a flag that the mode does not use is refused.
FLAGS_OF = {
    "train": ("config", "preset", "workdir", "init_from", "profile_steps", "distributed", *_PROCESS),
    "prepare": ("config", "preset", "launcher", "slurm"),
    "evaluate": ("workdir", "step", "split", "source", "reference", "output", "dtype", "min_length", *_DECODE),
    "translate": ("workdir", "step", "output_format", "sample", *_DECODE, *_SEARCH, *_SAMPLING),
    "backtranslate": ("workdir", "step", "source", "output", "tag", "sample", "seed", "dtype", *_DECODE, *_SAMPLING),
    "score": ("workdir", "step", "source", "target", "dtype"),
    "average": ("workdir", "last", "steps"),
    "export": ("workdir", "step", "format", "output"),
    "attention": ("workdir", "step", "source", "target", "output"),
    "serve": ("workdir", "step", "dtype", "host", "port", "allowed_hosts"),
}
# The flag without which each of these has no effect.
_NEEDS = dict.fromkeys(("seed", *_SAMPLING), "sample") | {"diversity": "groups"}
# The flag with which each of these has no effect.
_EXCLUDED_BY = dict.fromkeys(("beam_size", "early_stop"), "sample")
# What to do instead of giving a mode a flag that it does not use.
_INSTEAD = {
    ("translate", "source"): "give the text on standard input: < FILE",
    ("translate", "output"): "the translations go to standard output: > FILE",
}


def define_flags(argv: list[str]) -> flags.FlagValues:
    """Defines all flags, unparsed; --config.SECTION.FIELD exists for each field of the config file in `argv`."""
    args = command_line.define_config(argv)
    by_default = "default: that of the run's config"
    define = {
        flags.DEFINE_string: {
            "workdir": (
                None,
                "Run folder or its URL; to read, also a Marian folder; to translate or score, RUN1,RUN2: an ensemble.",
            ),
            "init_from": (None, "Run or Marian folder whose weights training starts from, with a fresh optimiser."),
            "source": (None, "Source text file, one sentence a line."),
            "target": (None, "Target text file of score and attention, line by line the translation of --source."),
            "reference": (None, "Reference translations of --source, for --mode=evaluate."),
            "output": (
                None,
                "Where evaluate writes its scores, default RUN/evaluations; the new folder of export and attention; "
                "the PREFIX of the two files of backtranslate.",
            ),
            "format": (None, "Format of --mode=export: marian, ctranslate2 or safetensors."),
            "profile_steps": (None, "Write a profiler trace of these training steps to RUN/profile: first,last."),
            "coordinator": (None, "HOST:PORT of process 0, where several processes train one run."),
            "steps": (None, "Average the checkpoints at these steps: a,b,c."),
            "step": (None, "Checkpoint: its step, last or averaged; default: averaged if there is one, else last."),
            "slurm": (
                "",
                "Resources of each job, NAME=VALUE,…: parameters of submitit's SlurmExecutor; needs time=MINUTES.",
            ),
            "tag": ("<BT>", "What --mode=backtranslate puts before each translation; empty: nothing."),
            "host": ("127.0.0.1", "Address that --mode=serve listens on; the default is for this machine alone."),
            "allowed_hosts": (
                None,
                "NAME,NAME: other names that requests to --mode=serve may have as Host, as behind a reverse proxy.",
            ),
            "target_prefix": (None, "Text file whose lines are forced as the beginnings of the translations."),
        },
        flags.DEFINE_multi_string: {
            "preset": (None, "gpu or miniature: changes fields of --config; flags take precedence."),
        },
        flags.DEFINE_integer: {
            "num_processes": (None, "Number of processes that train the run."),
            "process_id": (None, "Index of this process, from 0."),
            "last": (None, "Average this many of the newest checkpoints."),
            "port": (8000, "Port that --mode=serve listens on; 0: any free one."),
            "n_best": (1, "Number of translations of each sentence; above 1 needs --output_format=jsonl."),
            "min_length": (None, "Minimum subwords of a translation, EOS included; default: 2; with --constrained: 0."),
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
        flags.DEFINE_boolean: {
            "distributed": (False, "Join the processes that Slurm or another cluster manager started."),
            "constrained": (
                None,
                f"Search only among well-formed outputs: in parsing, trees over the words; {by_default}.",
            ),
            "split_sentences": (False, "Translate the sentences of a line separately, and join them by spaces."),
            "sample": (False, "Draw --n_best samples instead of beam search."),
        },
    }
    enums = {
        "mode": ("train", list(MODES), "What to do; flags it does not use are refused."),
        "launcher": (
            "local",
            ["local", "slurm"],
            "Where --mode=prepare encodes the corpus: on this machine, or in array jobs of Slurm.",
        ),
        "split": (None, ["dev", "test"], "Which of the run's own data --mode=evaluate scores; default: test."),
        "output_format": ("text", ["text", "jsonl"], "Of --mode=translate; jsonl has scores too."),
        "dtype": (
            None,
            ["float32", "bfloat16", "int8"],
            "Computation dtype of the model, int8 of its matrix products only; default: float32, for evaluate the "
            "config's evaluate.dtype.",
        ),
        "early_stop": (
            None,
            ["exact", "best_finished", "beam_full"],
            f"When the search of a sentence may stop before its length limit; {by_default}.",
        ),
    }
    for kind, described in define.items():
        for name, (default, text) in described.items():
            kind(name, default, text, flag_values=args)
    for name, (default, values, text) in enums.items():
        flags.DEFINE_enum(name, default, values, text, flag_values=args)
    flags.DEFINE_boolean("help", False, "Show this help.", short_name="h", flag_values=args)
    return args


def parse(argv: list[str]) -> flags.FlagValues:
    """The parsed flags; any mistake in them or in the config file is an InputError of one line."""
    return command_line.parse(argv, define_flags, base_ende.get_config())


def refuse_unused(args: flags.FlagValues) -> None:
    """Refuses flags that have no effect in the mode."""
    command_line.refuse_unused(args, FLAGS_OF, _NEEDS, _EXCLUDED_BY, _INSTEAD)
    if args.n_best > 1 and args.output_format == "text":
        raise InputError(f"--n_best={args.n_best} needs --output_format=jsonl; text has one translation a line")


def run_folders(args: flags.FlagValues) -> contextlib.AbstractContextManager[str]:
    """--workdir for a mode that trains nothing there, which may also be the folder of a published Marian model."""
    from t2t_jax.interop import workdir

    return workdir.run_folders(args.workdir, checkpoint(args.step))


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


def sampling_of(args: flags.FlagValues) -> Any:
    """The `Sampling` of the flags; None without --sample."""
    from t2t_jax.decoding.sampling import Sampling

    return Sampling(*(args[name].value for name in _SAMPLING)) if args.sample else None


def keep_compiled_programs() -> None:
    """Turns on JAX's persistent compilation cache, in the user's cache folder, unless JAX's variables are set."""
    values = {"jax_persistent_cache_min_compile_time_secs": 0.3, "jax_persistent_cache_min_entry_size_bytes": -1}
    with contextlib.suppress(InputError):  # without a home directory, nothing is kept
        values["jax_compilation_cache_dir"] = str(cache_folder() / "compiled")
    for name, value in values.items():
        os.environ.setdefault(name.upper(), str(value))
    # JAX reads them when it is imported, which a script with entries of its own does first.
    if (jax := sys.modules.get("jax")) and jax.config.jax_compilation_cache_dir is None:
        for name, value in values.items():
            jax.config.update(name, value)


def main(argv: list[str]) -> int:
    keep_compiled_programs()

    def run() -> None:
        args = parse(argv)
        if args.help:
            print(__doc__, args.get_help(include_special_flags=False), sep="\n")
        else:
            refuse_unused(args)
            MODES[args.mode](args)

    return exit_code_of(run)


def run() -> int:
    """`main` as a program of its own, also that of a script with entries of its own: with huge pages and signals."""
    huge_pages.enable()
    open_standard_streams()  # before a socket of signals.watch gets the number of a closed one
    signals.watch()
    return main(sys.argv)


if __name__ == "__main__":
    sys.exit(run())
