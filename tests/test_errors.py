import dataclasses
import math
import subprocess
import sys

import pytest

from t2t_jax.errors import InputError, Range, check_ranges


@dataclasses.dataclass
class Sizes:
    count: int = 1
    share: float = 0.5

    def __post_init__(self):
        check_ranges(
            {"count": Range(1, 10), "share": Range(0, 1, open_below=True, open_above=True, hint="half: 0.5")},
            self,
            "sizes.",
        )


def test_a_range_contains_its_ends_unless_they_are_open():
    assert [value in Range(1, 3) for value in (0, 1, 2, 3, 4)] == [False, True, True, True, False]
    assert [value in Range(0, 1, open_below=True, open_above=True) for value in (0, 0.5, 1)] == [False, True, False]
    assert [value in Range(0) for value in (math.nan, math.inf, -math.inf, 10**400)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 11}, "sizes.count must be at least 1 and at most 10; got 11"),
        ({"count": 10**9999}, r"sizes.count must be at least 1 and at most 10; got an integer of 33216 bits"),
        ({"count": 2.5}, "sizes.count must be a whole number; got 2.5"),
        ({"count": "2"}, "sizes.count must be a whole number; got '2'"),
        ({"share": None}, "sizes.share must be a number; got None"),
        ({"share": 1.0}, r"sizes.share must be above 0 and below 1 \(half: 0.5\); got 1.0"),
        ({"share": math.nan}, r"sizes.share must be finite, above 0 and below 1 \(half: 0.5\); got nan"),
    ],
)
def test_a_value_out_of_range_is_refused_with_field_value_and_range(values, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        Sizes(**values)


def test_a_command_whose_output_is_closed_ends_without_an_error():
    code = (
        "import sys; from t2t_jax.errors import exit_code_of; sys.exit(exit_code_of(lambda: print('line\\n' * 10**6)))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 0)
