"""The command lines of all programs but main.py, whose flags are absl's (command_line.py)."""

import argparse


def argument_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The parser of `python -m MODULE`; `description` is the module's docstring, which --help shows as written."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
