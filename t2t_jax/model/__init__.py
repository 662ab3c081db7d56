"""§3: what the network computes. Knows no files, no devices and no optimiser."""
