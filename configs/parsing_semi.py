"""Semi-supervised constituency parsing: Table 4.

The paper: F1 92.7 on section 23, trained on about 17 million sentences, nearly all of them parsed automatically
(Vinyals et al., 2015: sentences on which two parsers agree, and the output of the Berkeley parser); 32,000 source
tokens. About 118 million parameters.

    python main.py --config=configs/parsing_semi.py --workdir=runs/parsing_semi \\
        --config.data.archives=PTB/parsed/mrg/wsj --config.data.train=wsj,agreed.mrg.gz,berkeley.mrg.gz

`data.train` lists your files of parsed sentences; wsj is sections 02 to 21, and wsj:10 ten copies of each of their
trees. The paper does not say how often it repeats the gold trees.
"""

from configs import parsing_wsj


def get_config():
    config = parsing_wsj.get_config()  # "it", the same model, is trained in both settings (§6.3)

    # As in the paper's code for this setting, `transformer_parsing_big` of Tensor2Tensor. The sizes of that model
    # (d_ff 4096, 16 heads) are not taken: the paper describes one model.
    config.model.dropout = 0.1
    config.model.attention_dropout = 0.0
    config.optimizer.warmup_steps = 4000  # the peak of the learning rate is 2.47e-3

    config.data.train = "wsj,agreed.mrg.gz,berkeley.mrg.gz"  # your own files; without any, take parsing_wsj
    config.data.source_vocab_size = 32_768  # (§6.3)
    return config
