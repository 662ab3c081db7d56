"""Table 3, row (C): half of d_ff.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 5.12 and BLEU 25.4;
53 million parameters.

    python main.py --config=configs/table3/c_ff1024.py --workdir=runs/table3/c_ff1024
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.d_ff = 1024
    return config
