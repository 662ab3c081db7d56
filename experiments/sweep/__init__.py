"""Hyperparameter sweeps: configs × seeds → trials, run on this machine or by Slurm (`python -m experiments.sweep`)."""
