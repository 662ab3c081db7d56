"""One self-contained HTML page that shows all attention weights of some sentences.

The page has no network access: its Content-Security-Policy allows only its own script and style. Its JSON holds every
weight as two base-64 digits, a multiple of 1/4095: the error is at most 1/8190. Tokens are only ever set as text.
"""

import base64
import hashlib
import html
import importlib.resources
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from t2t_jax.data.plain_text import WITHOUT_SPACES
from t2t_jax.decoding.attention_maps import AttentionMap, AttentionMaps
from t2t_jax.visualization.figures import head_colours

LEVELS = 4095  # a weight of 1
_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_PAIRS = np.array([first + second for first in _DIGITS for second in _DIGITS])
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}  # so that no text can end the script element


def page(maps: Sequence[AttentionMaps], title: str) -> str:
    """The HTML page of these maps, all of one model."""
    read = lambda name: importlib.resources.files("t2t_jax.visualization").joinpath(name).read_text("utf-8")
    script, style = read("page.js"), read("page.css")
    policy = (
        f"default-src 'none'; script-src {csp_hash(script)}; style-src {csp_hash(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    parts = {"TITLE": html.escape(title), "POLICY": policy, "STYLE": style, "DATA": _json(maps), "SCRIPT": script}
    before, *rest = read("page.html").split("{{")
    return before + "".join(parts[name] + after for name, _, after in (piece.partition("}}") for piece in rest))


def weights_size(heads: int, source: int, target: int) -> int:
    """Bytes of the weights of a pair of S and T subwords in the page: 2 · (S² + T (T + 1) / 2 + T S) for each head.

    `heads` counts those of all layers.
    """
    return 2 * heads * (source**2 + target * (target + 1) // 2 + target * source)


def csp_hash(content: str) -> str:
    """How a Content-Security-Policy allows an inline script or style with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _json(maps: Sequence[AttentionMaps]) -> str:
    layers, heads = maps[0].encoder.weights.shape[:2]
    value = {
        "layers": layers,
        "heads": heads,
        "levels": LEVELS,
        "colours": head_colours(heads),
        "without_spaces": WITHOUT_SPACES.pattern,
        "sentences": [
            {
                "encoder": _map(pair.encoder),
                "decoder": _map(pair.decoder, causal=True),
                "encoder_decoder": _map(pair.encoder_decoder),
            }
            for pair in maps
        ],
    }
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(_ESCAPES)


def _map(map: AttentionMap, causal: bool = False) -> dict[str, Any]:
    """A map as JSON; of a causal one, row q holds the weights of keys 0 to q."""
    return {
        "queries": map.queries,
        "keys": map.keys,
        "query_words": map.query_words._asdict(),
        "key_words": map.key_words._asdict(),
        "causal": causal,
        "weights": [[_digits(head, causal) for head in layer] for layer in map.weights],
    }


def _digits(weights: np.ndarray, causal: bool) -> str:
    """The weights, row by row, as two base-64 digits each."""
    if causal:
        weights = weights[np.tril_indices_from(weights)]
    return "".join(_PAIRS[np.rint(weights.ravel() * LEVELS).astype(int).clip(0, LEVELS)].tolist())
