"""Table 3, row (C): twice the d_ff.

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 4.75 and BLEU 26.2;
90 million parameters.

    python main.py --config=configs/table3/c_ff4096.py --workdir=runs/table3/c_ff4096
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.d_ff = 4096
    return config
