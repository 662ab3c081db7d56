"""§5.1: downloads of corpora: looked for in the user's folder first; size and SHA-256 are checked before every use."""

import http.client
import os
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from t2t_jax.errors import DamagedError, InputError, full_disk_named
from t2t_jax.files import expanded, folder_lock, sha256
from t2t_jax.progress_bar import progress_bar


def download_folders(downloads: Path, archives: str) -> list[Path]:
    """Where to look for downloads: `archives`, the user's own folder if it is not "", then `downloads`."""
    if not archives:
        return [downloads]
    folder = expanded("data.archives", archives)
    if not folder.is_dir():
        raise InputError(
            f"data.archives={archives}: no such folder; name the one that has the archives, or leave it empty"
        )
    return [folder, downloads]


def downloaded(url: str, size: int, checksum: str, folders: Sequence[Path]) -> Path:
    """The file at `url` in the first of the folders that has it, else downloaded into the last; checked.

    The folder of downloads is locked meanwhile: other processes that need the file wait, and use it.
    """
    path = _find(url, folders)
    if path is None:
        with folder_lock(folders[-1], f"another process downloads to {folders[-1]}"):
            path = _find(url, folders) or download(url, folders[-1] / base_name(url), size)
    if (found_size := path.stat().st_size) != size:
        raise DamagedError(f"{path}: {found_size:,} bytes, expected {size:,}; replace it by {url}")
    if (found_checksum := sha256(path)) != checksum:
        raise DamagedError(f"{path}: sha256 is {found_checksum}, expected {checksum}; replace it by {url}")
    return path


def _find(url: str, folders: Sequence[Path]) -> Path | None:
    """The file of `url` in the first of the folders that has it."""
    paths = (folder / base_name(url) for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def base_name(url: str) -> str:
    """The file name of an archive."""
    return url.rsplit("/", 1)[-1]


def download(url: str, path: Path, size: int) -> Path:
    """Downloads the `size` bytes at `url` to `path`, atomically; the caller holds the lock of the folder."""
    partial = path.with_name(path.name + ".partial")
    advice = f"check the network, or put {path.name} into a folder and name that in data.archives"
    with (
        full_disk_named(partial),
        partial.open("wb") as file,
        progress_bar(total=size, unit="B", desc=path.name) as bar,
    ):
        for block in _blocks(url, advice):
            file.write(block)
            bar.update(len(block))
    if (found := partial.stat().st_size) != size:
        raise InputError(f"data.corpus: {url} gave {found:,} of {size:,} bytes; {advice}")
    os.replace(partial, path)
    return path


def _blocks(url: str, advice: str) -> Iterator[bytes]:
    """What is at `url`, in parts; errors of the network end with the advice."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            while block := response.read(1 << 20):
                yield block
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"data.corpus: could not download {url} ({error}); {advice}") from None
