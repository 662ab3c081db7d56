"""What is fastest on an NVIDIA GPU, by the programs that XLA compiles for an H100; nothing of it has run on one yet.

    python main.py --config=configs/base_ende.py --preset=gpu --workdir=runs/base_ende
    python -m experiments.sweep table3 --workdir=runs/table3 --set @gpu

Packed rows are one batch shape, compiled once, where length bucketing compiles one for each bucket.
"""

import ml_collections


def apply(config: ml_collections.ConfigDict) -> None:
    """bfloat16 and sequence packing, in place. In bfloat16, attention is cuDNN's where its kernel computes it."""
    config.train.dtype = config.evaluate.dtype = "bfloat16"
    config.data.packing, config.data.packing_shapes = True, 1
