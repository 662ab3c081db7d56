"""Table 3, row (C): eight layers in each stack.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 4.88 and BLEU 25.5;
80 million parameters.

    python main.py --config=configs/table3/c_n8.py --workdir=runs/table3/c_n8
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 8
    return config
