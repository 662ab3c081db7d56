"""Parses the command line: the config and its fields, presets, checkpoints and steps; each mistake in one line."""

import difflib
import functools
import importlib
import operator
import os
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from t2t_jax.errors import InputError, on_one_line
from t2t_jax.files import flat
from t2t_jax.validation import choice

flags.disclaim_key_flags()  # --help lists --config among the flags of the script that calls define_config


def define_config(argv: list[str]) -> flags.FlagValues:
    """--config alone, unparsed; --config.SECTION.FIELD exists for each field of the config file in `argv`."""
    args = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", None, "A config file, such as configs/base_ende.py; --config.SECTION.FIELD=VALUE overrides a field.",
        flag_values=args, sys_argv=argv,
    )  # fmt: skip
    return args


def parse(argv: list[str], define: Callable[[list[str]], flags.FlagValues], base: ConfigDict) -> flags.FlagValues:
    """The parsed flags; any mistake in them or in the config file is an InputError of one line.

    `define` defines them, unparsed; `base` is the config of configs/base_ende.py.
    """
    argv = join_config(argv)
    path = config_path(argv)
    if absl_own := [arg for arg in argv[1:] if re.match("--?(flagfile|undefok)", arg)]:
        raise InputError(f"{absl_own[0]}: no such flag; --help lists all")
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # ml_collections also logs what it raises
    try:
        args = define(argv)
        extra = args(argv)[1:]
    except flags.Error as error:
        raise InputError(unknown_field(argv, base) or reason_of(error, path, base)) from error
    except (Exception, SystemExit) as error:  # a config file is a program and may raise anything
        raise InputError(unknown_field(argv, base) or failure_of(error, path, argv, base)) from error
    finally:
        logging.set_verbosity(verbosity)
    if extra:
        raise InputError(f"unexpected argument {extra[0]!r}; options start with --")
    if path is not None:
        check_config(path, args.config, base)
    return args


def config_of(args: flags.FlagValues) -> ConfigDict:
    """--config as changed by each --preset, then by the flags --config.SECTION.FIELD."""
    config = required(args, "config")
    if not args.preset:
        return config
    given = flat(config.to_dict())
    config = _config_of_file(args)  # a preset scales fields: those of the file, not what the flags give
    for name in args.preset:
        load_preset("--preset", name)(config)
    config.update_from_flattened_dict({field: given[field] for field in overrides_of(args)})
    return config


def _config_of_file(args: flags.FlagValues) -> ConfigDict:
    """--config without the flags --config.SECTION.FIELD."""
    argv = ["main.py", f"--config={config_flags.get_config_filename(args['config'])}"]
    alone = define_config(argv)
    alone(argv)
    return alone.config


def overrides_of(args: flags.FlagValues) -> list[str]:
    """The fields that flags --config.SECTION.FIELD give."""
    return [name.removeprefix("config.") for name in args if name.startswith("config.") and args[name].present]


def load_preset(flag: str, name: str) -> Callable[[ConfigDict], None]:
    """What changes a config in place as configs/presets/NAME.py says; `flag` gives the name."""
    folder = importlib.import_module("configs.presets").__path__  # by name: configs/ is not part of the package
    known = [module.name for module in pkgutil.iter_modules(folder)]
    return importlib.import_module(f"configs.presets.{choice(flag, name, sorted(known))}").apply


def refuse_unused(
    args: flags.FlagValues,
    flags_of: Mapping[str, Collection[str]],
    needs: Mapping[str, str],
    excluded_by: Mapping[str, str],
    instead: Mapping[tuple[str, str], str],
) -> None:
    """Refuses flags that have no effect.

    `flags_of` are the flags of each mode. A flag of `needs` has no effect without the other, one of `excluded_by` none
    with the other. `instead` says what to do instead of giving a mode a flag.
    """
    given = {name.partition(".")[0] for name in args if args[name].present} - {"mode", "help", "h"}
    for name in sorted(given):
        if name not in flags_of[args.mode]:
            modes = " or ".join(mode for mode, names in flags_of.items() if name in names)
            hint = f"; {instead[args.mode, name]}" if (args.mode, name) in instead else ""
            raise InputError(f"--{name} is not used by --mode={args.mode}; it is for --mode={modes}{hint}")
        if name in needs and (needed := args[needs[name]]).value == needed.default:
            if needed.present:
                raise InputError(f"--{name} has no effect with --{needed.name}={needed.value}; leave out both")
            raise InputError(f"--{name} has no effect without --{needed.name}; give both or neither")
        if name in excluded_by and args[excluded_by[name]].value:
            raise InputError(f"--{name} has no effect with --{excluded_by[name]}; leave out one of them")


def required(args: flags.FlagValues, name: str) -> Any:
    """The value of a flag that this mode requires."""
    if args[name].value in (None, ""):
        output = "PREFIX" if args.mode == "backtranslate" else "DIR"
        examples = {"config": "configs/quickstart.py", "workdir": "runs/quickstart", "format": "ctranslate2"}
        example = (examples | {"output": output}).get(name, "FILE")
        raise InputError(f"--mode={args.mode} needs --{name}, for example --{name}={example}")
    return args[name].value


def join_config(argv: list[str]) -> list[str]:
    """Rewrites `--config FILE` in `argv` as `--config=FILE`, with the home folder in place of ~."""
    joined, rest = [], iter(argv)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        path = (value if equals else next(rest, None)) if re.fullmatch("--?config", flag) else None
        joined.append(arg if path is None else f"--config={os.path.expanduser(path)}")
    return joined


def config_path(argv: list[str]) -> str | None:
    """The path of the config file in `argv`, if any."""
    paths = [arg.partition("=")[2] for arg in argv if re.match("--?config=", arg)]
    if len(paths) > 1:
        raise InputError(f"--config={on_one_line(paths[1])}: --config is given {len(paths)} times; give it once")
    if not paths:
        return None
    (path,) = paths
    given = f"--config={on_one_line(path)}"
    if not os.path.isfile(path):
        raise InputError(f"{given}: no such file; see configs/")
    if not path.endswith(".py"):
        raise InputError(f"{given}: must be a Python file with a function get_config; see configs/")
    if ":" in path:  # after which ml_collections expects an argument of get_config
        raise InputError(f"{given}: no colon may be in its path; rename the file or folder")
    return path


def check_config(path: str, config: Any, base: ConfigDict) -> None:
    """Refuses a config whose fields or types of values differ from those of `base`, configs/base_ende.py.

    The `options` of a section, of which `base` has none, are those of an entry of one's own.
    """
    if not isinstance(config, ConfigDict):
        raise InputError(_no_config(path, type(config).__name__))
    known = flat(base.to_dict())
    given = {field: value for field, value in flat(config.to_dict()).items() if not _is_own(field, base)}
    for field in sorted(known.keys() ^ given.keys()):
        raise InputError(f"--config={path}: {field} is {'missing' if field in known else 'no field'}; start "
                         "from configs.base_ende.get_config(), which defines every field")  # fmt: skip
    for field, value in given.items():
        *sections, name = field.split(".")
        kind = functools.reduce(operator.getitem, sections, base).get_type(name)
        unset = value is known[field] is None
        if type(value) is not kind and not unset and not (kind is float and type(value) is int):
            raise InputError(f"--config={path}: {field} must be of type {kind.__name__}; got {value!r}")


def _is_own(field: str, base: ConfigDict) -> bool:
    section, *names = field.split(".")
    return len(names) > 1 and names[0] == "options" and section in base and "options" in base[section]


def unknown_field(argv: list[str], base: ConfigDict) -> str | None:
    """The message about a --config.SECTION.FIELD that `base` does not have, or a --SECTION.FIELD; None without one."""
    known = [f"--config.{field}" for field in flat(base.to_dict())]
    named = [arg.partition("=")[0] for arg in argv if arg.startswith("--")]
    short = [flag for flag in named if f"--config.{flag[2:]}" in known]
    given = [flag for flag in named if flag.startswith("--config.")]
    if (short or given) and not any(arg.startswith("--config=") for arg in argv):
        what = "overrides" if given else "is no flag but"
        return (
            f"{(given or short)[0]} {what} a field of a config; give --config too, for example "
            "--config=configs/quickstart.py; a mode that reads a run has flags instead, such as --beam_size"
        )
    if short:
        return f"{short[0]}: no such flag; did you mean --config.{short[0][2:]}?"
    unknown = [flag for flag in given if flag not in known and not _is_own(flag.removeprefix("--config."), base)]
    if not unknown:
        return None
    fields = [field for field in known if field.startswith(f"{unknown[0]}.")]
    if fields or _is_own(f"{unknown[0].removeprefix('--config.')}.NAME", base):
        fields = fields or [f"{unknown[0]}.NAME"]
        return f"{unknown[0]}: is a section of the config; give a field of it, such as {fields[0]}"
    near = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{unknown[0]}: no such field; {hint}configs/base_ende.py defines every field"


def failure_of(error: BaseException, path: str, argv: list[str], base: ConfigDict) -> str:
    """Why a config file, which is a program and may raise anything, has failed.

    A field that is not in `base` is named with the nearest one, of any section.
    """
    text = on_one_line(error)
    if isinstance(error, AttributeError) and "get_config" in text:
        return f"--config={path}: has no function get_config, as those in configs/ have; a preset is given by --preset"
    if found := re.search(r"Attribute <class '(\w+)'>\.\w+ does not exist", text):  # where flags set fields of it
        return _no_config(path, found[1])
    unknown = re.search(r'Key "(\w+)" does not exist', text) or re.search(r"^\W*(\w+)\W+nDid you mean", text)
    if isinstance(error, AttributeError):  # of a field that a flag sets in an empty section
        unknown = unknown or re.fullmatch(r"\W*(\w+)\W*", text)
    if unknown is None or not isinstance(error, AttributeError | KeyError):
        return f"--config={path}: {type(error).__name__}: {text}"
    name = unknown[1]
    for flag in (arg.partition("=")[0] for arg in argv):
        if flag.endswith(f".{name}") and _is_own(flag.removeprefix("--config."), base):
            return f"{flag}: {path} has no field {name}; a flag changes only options that the config file sets"
    fields = dict(zip(base, base, strict=True)) | {field.rpartition(".")[2]: field for field in flat(base.to_dict())}
    near = difflib.get_close_matches(name, fields, n=1)
    hint = f"did you mean {fields[near[0]]}? " if near else ""
    return f"--config={path}: no field {name}; {hint}configs/base_ende.py defines every field"


def _no_config(path: str, kind: str) -> str:
    hint = ", as by `return config`" if kind == "NoneType" else ""
    return f"--config={path}: get_config() must return a ConfigDict{hint}; got {kind}"


def reason_of(error: flags.Error, path: str | None, base: ConfigDict) -> str:
    """What is wrong with the flags, in words for users, not for programmers of absl."""
    text = str(error).strip()
    if "Traceback (most recent call last)" in text:  # of the config file, as ml_collections reports a wrong type
        return f"--config={path}: {on_one_line(text.splitlines()[-1])}"
    text = re.sub(r"invalid literal for int\(\) with base 10: .*", "must be a whole number", on_one_line(text))
    text = re.sub("could not convert string to float: .*", "must be a number", text)
    if unknown := re.match(r"Unknown command line flag '(\w+)'", text):
        fields = [field for field in flat(base.to_dict()) if field.rpartition(".")[2] == unknown[1]]
        if path and fields:
            return f"--{unknown[1]}: no such flag; did you mean --config.{fields[0]}?"
        if "Did you mean" not in text:
            text += "; --help lists all"
    return re.sub(r"\('Non-boolean argument to boolean flag', .*\)", "must be True or False", text)


def step_range(value: str | None) -> tuple[int, int] | None:
    """Parses --profile_steps: first,last."""
    if value is None:
        return None
    numbers = _step_numbers(value)
    if len(numbers) != 2 or numbers[0] > numbers[1]:
        raise InputError(f"--profile_steps={value}: must be first,last, as in 10,12")
    return numbers[0], numbers[1]


def checkpoint(step: str | None) -> int | str | None:
    """Parses --step: a step number, last or averaged."""
    if step in (None, "last", "averaged"):
        return step
    if not re.fullmatch("[0-9]{1,18}", step):
        raise InputError(f"--step={step}: must be the step of a checkpoint, last or averaged")
    return int(step)


def step_list(value: str | None) -> list[int] | None:
    """Parses --steps: a,b,c, each at most once."""
    if value is None:
        return None
    numbers = _step_numbers(value)
    if not numbers or len(set(numbers)) < len(numbers):
        raise InputError(f"--steps={value}: must be different step numbers separated by commas, as in 1000,2000")
    return numbers


def _step_numbers(text: str) -> list[int]:
    """Positive numbers separated by commas; an empty list for any other text."""
    return [int(part) for part in text.split(",")] if re.fullmatch("[1-9][0-9]{0,17}(,[1-9][0-9]{0,17})*", text) else []
