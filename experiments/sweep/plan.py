"""From the command line of a sweep to its trials: config files × presets and --set values × --grid × seeds."""

import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs import base_ende
from experiments.sweep.trials import MAIN, Trial
from t2t_jax import command_line
from t2t_jax.errors import InputError
from t2t_jax.files import flat
from t2t_jax.validation import choice

Preset = Callable[[Any], None]  # changes a config in place

CONFIGS = Path(os.path.relpath(Path(__file__).parents[2] / "configs"))


def make_trials(
    folder: str,
    workdir: Path,
    rows: str | None,
    seeds: int,
    settings: Sequence[str],
    grid: Sequence[str] = (),
    script: Path = MAIN,
) -> list[Trial]:
    """The trials of a sweep: all rows with seed 0, then all with seed 1, and so on. A grid has a row for each point."""
    if not 1 <= seeds <= 10_000:
        raise InputError(f"--seeds={seeds}: must be at least 1, the number of seeds, and at most 10000")
    if (file := Path(folder)).suffix == ".py":
        raise InputError(f"{folder}: is one config; give its folder and its row: {file.parent} --rows={file.stem}")
    presets, values = parse_settings(settings)
    points = grid_points(grid, values)
    changes = {}
    for row, path in row_files(folder, rows).items():
        of_row = preset_changes(path, presets) | values
        changes |= {row + suffix: (path, of_row | point) for suffix, point in points.items()}
    trials = [
        make_trial(f"{row}/seed_{seed}", workdir, path, of_row | {"train.seed": str(seed)}, script)
        for seed in range(seeds)
        for row, (path, of_row) in changes.items()
    ]
    _refuse_equal_points(trials)
    return trials


def row_files(folder: str, rows: str | None = None) -> dict[str, Path]:
    """The config file of each row, by row: those of a comma-separated list, or all files of the folder."""
    in_folder = lambda path: {file.stem: file for file in sorted(path.glob("*.py")) if file.stem != "__init__"}
    files = in_folder(Path(folder)) or in_folder(CONFIGS / folder)  # a sweep's own folder may be called table3 too
    if not files:
        raise InputError(f"{folder}: not a folder of configs; table3 is one")
    return files if rows is None else {row: files[choice("--rows", row, files)] for row in rows.split(",")}


def parse_settings(settings: Sequence[str]) -> tuple[list[Preset], dict[str, str]]:
    """The presets, and {field: value}. Values override presets, whatever their order."""
    presets = [command_line.load_preset("--set", setting[1:]) for setting in settings if setting.startswith("@")]
    values = {}
    for setting in settings:
        field, separator, value = setting.partition("=")
        if setting.startswith("@"):
            continue
        if not separator:
            raise InputError(f"--set {setting}: must be SECTION.FIELD=VALUE, as in train.train_steps=2000, or @PRESET")
        _refuse_seed("--set", setting, field)
        values[field] = value
    return presets, values


def grid_points(axes: Sequence[str], values: dict[str, str]) -> dict[str, dict[str, str]]:
    """The points of the grid that is the product of the axes FIELD=V1,V2,…: {end of a row's name: {field: value}}.

    Without axes, one point that changes nothing. `values` are those of --set.
    """
    grid: dict[str, list[str]] = {}
    for axis in axes:
        field, separator, listed = axis.partition("=")
        if not (separator and all(listed.split(","))):
            raise InputError(f"--grid {axis}: must be SECTION.FIELD=V1,V2,…, as in optimizer.warmup_steps=500,1000")
        _refuse_seed("--grid", axis, field)
        if field in grid or field in values:
            raise InputError(f"--grid {axis}: {field} is given twice; give all its values in one --grid")
        grid[field] = listed.split(",")
    points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    named = {"".join(_name_of(*change) for change in point.items()): point for point in points}
    if len(named) < len(points):
        raise InputError(f"--grid {' '.join(axes)}: two points would have one name; give different values")
    return named


def _refuse_equal_points(trials: Sequence[Trial]) -> None:
    """Two points of a grid, such as 0 and 0.0, may be one config."""
    first = {}
    for trial in trials:
        equal = first.setdefault((trial.config, json.dumps(trial.settings, sort_keys=True)), trial)
        if equal is not trial:
            raise InputError(f"--grid: {equal.name} and {trial.name} have the same config; give different values")


def _name_of(field: str, value: str) -> str:
    """_FIELD_VALUE, in characters that the name of a folder may have."""
    return f"_{field.rpartition('.')[2]}_{re.sub(r'[^A-Za-z0-9.+-]', '-', value)}"


def _refuse_seed(flag: str, given: str, field: str) -> None:
    if field == "train.seed":
        raise InputError(f"{flag} {given}: each trial has its own seed; --seeds=N makes them 0 to N-1")


def script_path(path: str) -> Path:
    """The value of --main."""
    if not (Path(path).is_file() and path.endswith(".py")):
        raise InputError(
            f"--main={path}: no such Python file; give a script that calls main.run (docs/architecture.md)"
        )
    return Path(path)


def preset_changes(path: Path, presets: Sequence[Preset]) -> dict[str, str]:
    """The fields that the presets change in the config of this file."""
    config = parse_config(path)
    before = flat(config.to_dict())
    for preset in presets:
        preset(config)
    return {field: str(value) for field, value in flat(config.to_dict()).items() if value != before[field]}


def make_trial(name: str, workdir: Path, path: Path, changes: dict[str, str], script: Path) -> Trial:
    """A trial; refuses the values that `main.py` would refuse to parse."""
    return Trial(name, workdir / name, path, changes, parse_config(path, changes).to_dict(), script)


def parse_config(path: Path, changes: dict[str, str] | None = None) -> Any:
    """The config as `main.py` parses it from the file and the flags."""
    flags = [f"--config.{field}={value}" for field, value in (changes or {}).items()]
    argv = ["main.py", f"--config={path}", *flags]
    return command_line.parse(argv, command_line.define_config, base_ende.get_config()).config
