"""What is fastest on an NVIDIA GPU, by measurements of an H100 and an H200 (docs/accelerators.md).

    python main.py --config=configs/base_ende.py --preset=gpu --workdir=runs/base_ende
    python -m experiments.sweep table3 --workdir=runs/table3 --set @gpu

Packed rows are two batch shapes, where length bucketing compiles one for each bucket. In a single shape, whose rows are
four times as long, attention takes three times as long.
"""

import ml_collections


def apply(config: ml_collections.ConfigDict) -> None:
    """bfloat16 and sequence packing, in place. In bfloat16, attention is cuDNN's where its kernel computes it."""
    config.train.dtype = config.evaluate.dtype = "bfloat16"
    config.data.packing, config.data.packing_shapes = True, 2
