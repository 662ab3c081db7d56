"""Text made on the spot: English number words, and "German" ones in reverse order."""

import random
from pathlib import Path

EN = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
DE = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"]


def pairs(count: int, seed: int, longest: int = 6) -> list[tuple[str, str]]:
    rng = random.Random(seed)
    numbers = [[rng.randrange(len(EN)) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    return [(" ".join(EN[n] for n in ns), " ".join(DE[n] for n in reversed(ns))) for ns in numbers]


def write(prefix: Path, pairs: list[tuple[str, str]]) -> str:
    """Writes PREFIX.en and PREFIX.de; returns PREFIX."""
    for side, language in enumerate(("en", "de")):
        Path(f"{prefix}.{language}").write_text("".join(pair[side] + "\n" for pair in pairs), "utf-8")
    return str(prefix)


def write_splits(directory: Path, train: int = 300) -> dict[str, str]:
    """A training set and two small held-out ones, as the fields of `config.data` that name them."""
    sizes = {"train": train, "dev": 12, "test": 20}
    return {split: write(directory / split, pairs(n, seed)) for seed, (split, n) in enumerate(sizes.items())}
