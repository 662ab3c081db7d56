"""Changes to any config, by name: `apply` of `configs/presets/NAME.py` is what the sweep's `--set @NAME` does."""
