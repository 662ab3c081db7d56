"""How often the functions of continuous batching have been compiled."""

from t2t_jax.decoding import continuous_batching


def num_compiled() -> list[int]:
    names = ("_start", "_source", "_decode", "_resize")
    return [getattr(continuous_batching, name)._cache_size() for name in names]
