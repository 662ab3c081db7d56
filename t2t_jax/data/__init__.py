"""§5.1: raw text → token ids → batches. Host code: no jax anywhere in the room."""
