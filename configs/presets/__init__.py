"""Presets that change any config: `--preset=NAME` and the sweep's `--set @NAME` call `apply` of the file NAME.py."""
