"""One file for each experiment, most of them a row of the paper."""
