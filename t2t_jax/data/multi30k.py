"""Multi30k: English descriptions of 31,000 images in German and French, a small corpus (docs/multi30k.md).

Task 1 of the repository github.com/multi30k/dataset, raw text: 29,000 training and 1,014 dev pairs, and three test
sets: test_2016_flickr ('test', 1,000 pairs), test_2017_flickr (1,000) and test_2017_mscoco (461).
"""

from collections.abc import Iterator
from pathlib import Path

from t2t_jax.data.downloads import download_folders, downloaded
from t2t_jax.files import unpacked_lines

_FOLDER = "data/task1/raw"  # of the repository
_URL = f"https://raw.githubusercontent.com/multi30k/dataset/master/{_FOLDER}"
_PARTS = {  # our name → theirs
    "train": "train",
    "dev": "val",
    "test": "test_2016_flickr",
    "test_2017_flickr": "test_2017_flickr",
    "test_2017_mscoco": "test_2017_mscoco",
}
_FILES = {  # bytes and SHA-256
    "train.de.gz": (637044, "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
    "train.en.gz": (568929, "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
    "train.fr.gz": (604242, "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c"),
    "val.de.gz": (24681, "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
    "val.en.gz": (21650, "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
    "val.fr.gz": (23001, "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9"),
    "test_2016_flickr.de.gz": (22890, "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8"),
    "test_2016_flickr.en.gz": (21077, "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9"),
    "test_2016_flickr.fr.gz": (22310, "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90"),
    "test_2017_flickr.de.gz": (21471, "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee"),
    "test_2017_flickr.en.gz": (19138, "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074"),
    "test_2017_flickr.fr.gz": (20434, "3ba671ceb2299f3304ffafefea7a833d08632fbaf0ba18546f8a2ec2391af496"),
    "test_2017_mscoco.de.gz": (10230, "799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338"),
    "test_2017_mscoco.en.gz": (8844, "aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58"),
    "test_2017_mscoco.fr.gz": (9751, "754f3072ba9f124569ba5258b32730fc1d214bbf8e0c6dfb2b74401676220db0"),
}
SPLITS = tuple(_PARTS)


def files(languages: tuple[str, str], directory: Path, archives: str) -> dict[str, Path]:
    """{name: path} of the files of both languages, checked; those that `archives` lacks are downloaded.

    `archives` is a folder of these files, or a checkout of the repository.
    """
    folders = download_folders(directory / "downloads", archives)
    folders.insert(0, folders[0] / _FOLDER)
    names = [name for name in _FILES if name.split(".")[1] in languages]
    return {name: downloaded(f"{_URL}/{name}", *_FILES[name], folders) for name in names}


def checksums(names: dict[str, Path]) -> dict[str, str]:
    """The SHA-256 of each of these files."""
    return {name: _FILES[name][1] for name in names}


def pairs(split: str, languages: tuple[str, str], paths: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Streams the pairs of a split, in the order of the files."""
    name = _PARTS[split]
    sides = [paths[f"{name}.{language}.gz"] for language in languages]
    return zip(*map(unpacked_lines, sides), strict=True)
