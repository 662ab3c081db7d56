"""The base model on WMT14 English–French: Table 2.

The paper: 100,000 steps, 12 hours on eight P100; newstest2014 BLEU 38.1 (average of five). It
trains on 36 million of the 40.8 million pairs of the corpora and does not say which were dropped. The limits here are
those of ConvS2S (Gehring et al. 2017), which keep 35.5 million. fairseq's script, too, normalises punctuation; it
limits subwords, not words.

    python main.py --config=configs/base_enfr.py --workdir=runs/base_enfr
"""

from configs import base_ende


def get_config():
    config = base_ende.get_config()

    config.data.corpus = "wmt14_enfr"
    config.data.target_language = "fr"
    config.data.vocab_size = 32000  # (§5.1)
    config.data.cleaning.normalize_punctuation = True
    config.data.cleaning.remove_nonprinting = True
    config.data.cleaning.max_words = 175
    config.data.cleaning.max_ratio = 1.5
    return config
