"""A small parser for the 30,830 biomedical trees of the CRAFT corpus, or a treebank of your own.

    python main.py --config=configs/parsing_craft.py --workdir=runs/parsing_craft \\
        --config.data.train=craft.train.mrg.gz --config.data.dev=craft.dev.mrg.gz --config.data.test=craft.test.mrg.gz

The three files hold bracketed trees, as in the Penn Treebank. CRAFT is free (CC BY 3.0). Words are numbered on both
sides, their part-of-speech tags are the leaves, and brackets are written in order (docs/parsing_craft.md says why).
On a processor with bfloat16 products (AMX, AVX-512), --config.train.dtype=bfloat16 is faster.

F1 on the 2,612 test sentences is 81.8 with --constrained, 78.1 with malformed outputs repaired; one seed, 119 minutes
in bfloat16 on two cores of an AMD EPYC (experiments/results/parsing_craft).
"""

from configs import base_ende


def get_config():
    config = base_ende.get_config()

    config.model.num_layers = 3
    config.model.d_model = 256
    config.model.d_ff = 1024
    config.model.num_heads = 4
    config.model.norm = "pre"
    config.model.dropout = 0.2
    config.model.share_embeddings = False

    config.data.task = "parsing_in_order"
    config.data.corpus = "trees"
    config.data.target_language = "trees"
    config.data.source_vocab_size = 8000
    config.data.vocab_size = 512  # an upper limit: the vocabulary is the symbols of the training trees
    config.data.max_length = 384
    config.data.tokens_per_batch = 1536
    config.data.packing = False
    config.data.num_buckets = 12

    config.optimizer.warmup_steps = 1000
    config.train.train_steps = 28_000

    config.checkpoint.interval_minutes = 0.0
    config.checkpoint.interval_steps = 500
    config.checkpoint.keep = 12
    config.checkpoint.average_last = 12
    config.decode.beam_size = 8  # 21 in the paper (§6.3)
    config.decode.alpha = 0.3  # (§6.3)
    config.decode.max_extra_length = 300  # (§6.3)
    config.evaluate.interval_steps = 0  # a beam search on the dev set takes as long as a thousand steps
    return config
