"""Renders tables as Markdown, LaTeX or CSV."""

import csv
import io
import re
import sys
from collections.abc import Iterable, Sequence

FORMATS = ("markdown", "latex", "csv")

_LATEX = {"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}",
          "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
          "|": r"\textbar{}", "<": r"\textless{}", ">": r"\textgreater{}",  # dashes and ¡ ¿ in LaTeX's default encoding
          "×": r"$\times$", "±": r"$\pm$", "→": r"$\to$", "−": "$-$", "ε": r"$\varepsilon$", "α": r"$\alpha$",
          "≤": r"$\leq$", "³": "$^3$", "⁶": "$^6$"}  # fmt: skip
_SUPERSCRIPT = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_POWER_OR_CHARACTER = re.compile(f"·10([{_SUPERSCRIPT}]+)|.", re.DOTALL)  # ³ and ⁶ may be of either


def render(header: Sequence[str], rows: Sequence[Sequence[str]], format: str, num_left: int = 1) -> str:
    """The table as text; the first `num_left` columns are aligned left, all others right."""
    if format == "csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        return text.getvalue().rstrip("\n")
    if format == "latex":
        lines = [" & ".join(in_latex(cell) for cell in row) + r" \\" for row in (header, *rows)]
        columns = "l" * num_left + "r" * (len(header) - num_left)
        head = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", lines[0], r"\hline"]
        return "\n".join([*head, *lines[1:], r"\hline", r"\end{tabular}"])
    rule = ["---"] * num_left + ["---:"] * (len(header) - num_left)
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in (header, rule, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def print_notes(notes: Iterable[str], format: str) -> None:
    """Prints the notes under a table: on standard output, or on standard error where standard output is CSV."""
    for note in notes:
        text = in_latex(note) if format == "latex" else note
        print(f"\n{text}", file=sys.stderr if format == "csv" else sys.stdout)


def power_of_ten(value: float | None, format: str) -> str:
    """3.3·10¹⁸, or 3.3e18 in CSV; empty for None."""
    if not value:
        return "" if value is None else "0"
    mantissa, is_large, exponent = f"{value:.1e}".partition("e+")
    if not is_large or format == "csv":
        return f"{mantissa}e{exponent}" if is_large else mantissa  # 1.0e-05 has no "e+" and is all mantissa
    return f"{mantissa}·10" + "".join(_SUPERSCRIPT[int(digit)] for digit in str(int(exponent)))


def in_latex(text: str) -> str:
    """Text with its special characters escaped for LaTeX."""

    def escaped(match: re.Match[str]) -> str:
        if digits := match[1]:
            return rf"$\cdot 10^{{{''.join(str(_SUPERSCRIPT.index(digit)) for digit in digits)}}}$"
        return _LATEX.get(match[0], match[0])

    return _POWER_OR_CHARACTER.sub(escaped, text)
