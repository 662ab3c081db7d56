"""From the command line of a sweep to its trials: config files × presets and --set values × seeds."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import main
from experiments.sweep.trials import Trial
from t2t_jax.errors import InputError, choice
from t2t_jax.files import flat

Preset = Callable[[Any], None]  # changes a config in place

CONFIGS = Path(os.path.relpath(Path(__file__).parents[2] / "configs"))


def make_trials(folder: str, workdir: Path, rows: str | None, seeds: int, settings: Sequence[str]) -> list[Trial]:
    """The trials of a sweep: all rows with seed 0, then all with seed 1, and so on."""
    if not 1 <= seeds <= 10_000:
        raise InputError(f"--seeds={seeds}: must be at least 1, the number of seeds, and at most 10000")
    presets, values = parse_settings(settings)
    files = row_files(folder, rows)
    changes = {row: preset_changes(path, presets) | values for row, path in files.items()}
    return [
        make_trial(f"{row}/seed_{seed}", workdir, path, changes[row] | {"train.seed": str(seed)})
        for seed in range(seeds)
        for row, path in files.items()
    ]


def row_files(folder: str, rows: str | None = None) -> dict[str, Path]:
    """The config file of each row, by row: those of a comma-separated list, or all files of the folder."""
    path = Path(folder) if Path(folder).is_dir() else CONFIGS / folder
    files = {file.stem: file for file in sorted(path.glob("*.py")) if file.stem != "__init__"}
    if not files:
        raise InputError(f"{folder}: not a folder of configs; table3 is one")
    return files if rows is None else {row: files[choice("--rows", row, files)] for row in rows.split(",")}


def parse_settings(settings: Sequence[str]) -> tuple[list[Preset], dict[str, str]]:
    """The presets, and {field: value}. Values override presets, whatever their order."""
    presets = [main.load_preset("--set", setting[1:]) for setting in settings if setting.startswith("@")]
    values = {}
    for setting in settings:
        field, separator, value = setting.partition("=")
        if setting.startswith("@"):
            continue
        if not separator:
            raise InputError(f"--set {setting}: must be SECTION.FIELD=VALUE, as in train.train_steps=2000, or @PRESET")
        if field == "train.seed":
            raise InputError(f"--set {setting}: each trial has its own seed; --seeds=N makes them 0 to N-1")
        values[field] = value
    return presets, values


def preset_changes(path: Path, presets: Sequence[Preset]) -> dict[str, str]:
    """The fields that the presets change in the config of this file."""
    config = parse_config(path)
    before = flat(config.to_dict())
    for preset in presets:
        preset(config)
    return {field: str(value) for field, value in flat(config.to_dict()).items() if value != before[field]}


def make_trial(name: str, workdir: Path, path: Path, changes: dict[str, str]) -> Trial:
    """A trial; refuses the values that `main.py` would refuse to parse."""
    return Trial(name, workdir / name, path, changes, parse_config(path, changes).to_dict())


def parse_config(path: Path, changes: dict[str, str] | None = None) -> Any:
    """The config as `main.py` parses it from the file and the flags."""
    flags = [f"--config.{field}={value}" for field, value in (changes or {}).items()]
    return main.parse(["main.py", f"--config={path}", *flags]).config
