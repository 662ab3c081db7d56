"""Presets that change any config: the sweep's `--set @NAME` calls `apply` of `configs/presets/NAME.py`."""
