"""Transformer-tiny on Multi30k English-French; all but the language is `configs/multi30k_ende.py`.

python main.py --config=configs/multi30k_enfr.py --workdir=runs/multi30k_enfr
"""

from configs import multi30k_ende


def get_config():
    config = multi30k_ende.get_config()
    config.data.corpus = "multi30k_enfr"
    config.data.target_language = "fr"
    return config
