"""Table 3, row (C): four layers in each stack.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 5.19 and BLEU 25.3;
50 million parameters.

    python main.py --config=configs/table3/c_n4.py --workdir=runs/table3/c_n4
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.num_layers = 4
    return config
