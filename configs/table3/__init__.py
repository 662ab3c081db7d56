"""Table 3: one file for each row, which is `base` with the fields of that row."""
