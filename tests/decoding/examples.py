"""The Python examples of the documentation, run as they stand."""

import re
from pathlib import Path
from typing import Any

import pytest

import t2t_jax

ROOT = Path(__file__).parents[2]


def run_examples(pages: tuple[str, ...], count: int, **instead: Any) -> dict[str, Any]:
    """The names that the `count` examples of the pages define, run one after the other.

    `instead` are functions that stand for those of `t2t_jax`, as there is no run to read.
    """
    text = "\n".join((ROOT / page).read_text() for page in pages)
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == count
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, function in instead.items():
            patch.setattr(t2t_jax, name, function)
        for block in blocks:
            exec(block, names)
    return names
