"""Table 3: one file, one row; each is `base` with its own fields."""
