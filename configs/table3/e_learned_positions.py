"""Table 3, row (E): learned positional embeddings instead of sinusoids (§3.5).

The paper: 100,000 steps, for the base model 12 hours on eight P100; newstest2013 perplexity 4.92 and BLEU 25.7;
65 million parameters, as base.

    python main.py --config=configs/table3/e_learned_positions.py --workdir=runs/table3/e_learned_positions
"""

from configs.table3 import base


def get_config():
    config = base.get_config()
    config.model.positions = "learned"
    return config
