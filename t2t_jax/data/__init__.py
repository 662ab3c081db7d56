"""§5.1: raw text → token ids → batches. Host code: nothing in this package imports jax."""
