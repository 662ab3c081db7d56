"""Dataclasses of options as arguments of `jax.jit`: numbers that change no shape are traced, the rest is static."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


def traced_fields(*names: str) -> Callable[[type], type]:
    """Registers a dataclass as a pytree with these fields as leaves, so that jit compiles nothing for other values.

    The other fields belong to the structure of the tree, by which jit recognises a compiled program; they must be
    hashable. Unlike with `jax.tree_util.register_dataclass`, tracers do not pass through the constructor, whose checks
    need values.
    """

    def register(kind: type) -> type:
        static = [field.name for field in dataclasses.fields(kind) if field.name not in names]

        def flatten(options: Any) -> tuple[list[Any], tuple[Any, ...]]:
            return [getattr(options, name) for name in names], tuple(getattr(options, name) for name in static)

        def unflatten(values: tuple[Any, ...], leaves: list[Any]) -> Any:
            options = object.__new__(kind)
            vars(options).update(zip((*static, *names), (*values, *leaves), strict=True))
            return options

        jax.tree_util.register_pytree_node(kind, flatten, unflatten)
        return kind

    return register
