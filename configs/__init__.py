"""One file, one experiment, one row of the paper."""
