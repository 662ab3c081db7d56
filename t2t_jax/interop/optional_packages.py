"""The packages of other systems, which are installed with t2t_jax[interop] only."""

import importlib

from t2t_jax.errors import InputError


def need(package: str) -> None:
    """Raises InputError where an optional package is not installed."""
    try:
        importlib.import_module(package)
    except ImportError:
        raise InputError(f"this needs the package {package}; pip install 't2t_jax[interop]'") from None
