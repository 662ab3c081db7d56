"""The numbers printed in the paper's Tables 2, 3 and 4; an empty cell is absent here, or None."""

from typing import Any, NamedTuple


class Translation(NamedTuple):
    """A row of Table 2: BLEU on newstest2014 as printed, and training cost in floating-point operations."""

    model: str
    bleu_ende: str | None
    bleu_enfr: str | None
    cost_ende: float | None
    cost_enfr: float | None


TABLE_2 = (
    Translation("ByteNet", "23.75", None, None, None),
    Translation("Deep-Att + PosUnk", None, "39.2", None, 1.0e20),
    Translation("GNMT + RL", "24.6", "39.92", 2.3e19, 1.4e20),
    Translation("ConvS2S", "25.16", "40.46", 9.6e18, 1.5e20),
    Translation("MoE", "26.03", "40.56", 2.0e19, 1.2e20),
    Translation("Deep-Att + PosUnk Ensemble", None, "40.4", None, 8.0e20),
    Translation("GNMT + RL Ensemble", "26.30", "41.16", 1.8e20, 1.1e21),
    Translation("ConvS2S Ensemble", "26.36", "41.29", 7.7e19, 1.2e21),
    Translation("Transformer (base model)", "27.3", "38.1", 3.3e18, 3.3e18),  # printed once for both language pairs
    Translation("Transformer (big)", "28.4", "41.8", 2.3e19, 2.3e19),
)

SUSTAINED_TFLOPS = {"K80": 2.8, "K40": 3.7, "M40": 6.0, "P100": 9.5}  # footnote 5

# Table 3: base has all values, every other row those that are printed. Perplexity and BLEU on newstest2013; parameters
# in millions.
TABLE_3: dict[str, dict[str, Any]] = {
    "base": {
        "num_layers": 6, "d_model": 512, "d_ff": 2048, "num_heads": 8, "d_k": 64, "d_v": 64, "dropout": 0.1,
        "label_smoothing": 0.1, "train_steps": 100_000, "perplexity": 4.92, "bleu": 25.8, "parameters": 65,
    },
    "a_h1": {"num_heads": 1, "d_k": 512, "d_v": 512, "perplexity": 5.29, "bleu": 24.9},
    "a_h4": {"num_heads": 4, "d_k": 128, "d_v": 128, "perplexity": 5.00, "bleu": 25.5},
    "a_h16": {"num_heads": 16, "d_k": 32, "d_v": 32, "perplexity": 4.91, "bleu": 25.8},
    "a_h32": {"num_heads": 32, "d_k": 16, "d_v": 16, "perplexity": 5.01, "bleu": 25.4},
    "b_dk16": {"d_k": 16, "perplexity": 5.16, "bleu": 25.1, "parameters": 58},
    "b_dk32": {"d_k": 32, "perplexity": 5.01, "bleu": 25.4, "parameters": 60},
    "c_n2": {"num_layers": 2, "perplexity": 6.11, "bleu": 23.7, "parameters": 36},
    "c_n4": {"num_layers": 4, "perplexity": 5.19, "bleu": 25.3, "parameters": 50},
    "c_n8": {"num_layers": 8, "perplexity": 4.88, "bleu": 25.5, "parameters": 80},
    "c_d256": {"d_model": 256, "d_k": 32, "d_v": 32, "perplexity": 5.75, "bleu": 24.5, "parameters": 28},
    "c_d1024": {"d_model": 1024, "d_k": 128, "d_v": 128, "perplexity": 4.66, "bleu": 26.0, "parameters": 168},
    "c_ff1024": {"d_ff": 1024, "perplexity": 5.12, "bleu": 25.4, "parameters": 53},
    "c_ff4096": {"d_ff": 4096, "perplexity": 4.75, "bleu": 26.2, "parameters": 90},
    "d_drop00": {"dropout": 0.0, "perplexity": 5.77, "bleu": 24.6},
    "d_drop02": {"dropout": 0.2, "perplexity": 4.95, "bleu": 25.5},
    "d_ls00": {"label_smoothing": 0.0, "perplexity": 4.67, "bleu": 25.3},
    "d_ls02": {"label_smoothing": 0.2, "perplexity": 5.47, "bleu": 25.7},
    "e_learned_positions": {"perplexity": 4.92, "bleu": 25.7},
    "big": {
        "num_layers": 6, "d_model": 1024, "d_ff": 4096, "num_heads": 16, "dropout": 0.3, "train_steps": 300_000,
        "perplexity": 4.33, "bleu": 26.4, "parameters": 213,
    },
}  # fmt: skip


def train_steps(row: str) -> int:
    """Training steps of a row of Table 3."""
    return (TABLE_3["base"] | TABLE_3[row])["train_steps"]


class Parser(NamedTuple):
    """A row of Table 4: F1 on section 23 of the Wall Street Journal as printed."""

    parser: str
    training: str
    f1: str


WSJ_ONLY, SEMI_SUPERVISED = "WSJ only, discriminative", "semi-supervised"

TABLE_4 = (
    Parser("Vinyals & Kaiser et al. (2014) [37]", WSJ_ONLY, "88.3"),
    Parser("Petrov et al. (2006) [29]", WSJ_ONLY, "90.4"),
    Parser("Zhu et al. (2013) [40]", WSJ_ONLY, "90.4"),
    Parser("Dyer et al. (2016) [8]", WSJ_ONLY, "91.7"),
    Parser("Transformer (4 layers)", WSJ_ONLY, "91.3"),
    Parser("Zhu et al. (2013) [40]", SEMI_SUPERVISED, "91.3"),
    Parser("Huang & Harper (2009) [14]", SEMI_SUPERVISED, "91.3"),
    Parser("McClosky et al. (2006) [26]", SEMI_SUPERVISED, "92.1"),
    Parser("Vinyals & Kaiser et al. (2014) [37]", SEMI_SUPERVISED, "92.1"),
    Parser("Transformer (4 layers)", SEMI_SUPERVISED, "92.7"),
    Parser("Luong et al. (2015) [23]", "multi-task", "93.0"),
    Parser("Dyer et al. (2016) [8]", "generative", "93.3"),
)
WSJ_23_SENTENCES = 2_416
