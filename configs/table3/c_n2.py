"""Table 3, row (C): two layers in each stack.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 6.11 and BLEU 23.7;
36 million parameters.

    python main.py --config=configs/table3/c_n2.py --workdir=runs/table3/c_n2
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 2
    return config
