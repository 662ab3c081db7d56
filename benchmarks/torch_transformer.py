"""PyTorch's side of `benchmarks.training`: our model built from torch.nn's layers, and its training step.

Attention has no biases and the stacks no final layer norm, so that both sides have the same parameters.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, np.ndarray]

# torch's names → those of `t2t_jax.interop.torch_names`
_BOTH = {"linear1": "fc1", "linear2": "fc2", "multihead_attn": "encoder_attn", "norm1": "self_attn_layer_norm"}
_NAMES = {
    "encoder": _BOTH | {"norm2": "final_layer_norm"},
    "decoder": _BOTH | {"norm2": "encoder_attn_layer_norm", "norm3": "final_layer_norm"},
}


class Transformer(nn.Module):
    """The model of `config.model`, for sentences of at most `max_length` subwords."""

    def __init__(self, shape: Mapping[str, Any], vocab_size: int, max_length: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, shape["d_model"])
        layers = range(shape["num_layers"])
        self.encoder = nn.ModuleList(_layer(nn.TransformerEncoderLayer, shape) for _ in layers)
        self.decoder = nn.ModuleList(_layer(nn.TransformerDecoderLayer, shape) for _ in layers)
        self.dropout = nn.Dropout(shape["dropout"])
        self.register_buffer("positions", _sinusoids(max_length, shape["d_model"]), persistent=False)
        self.register_buffer("causal", torch.ones(max_length, max_length).triu(1).bool(), persistent=False)

    def forward(self, inputs: Tensor, targets: Tensor, input_pads: Tensor | None, target_pads: Tensor | None) -> Tensor:
        """The last layer's output; the masks (True at padding) may be None where no real token attends to padding."""
        x = self.embed(self._vectors(inputs))
        for layer in self.encoder:
            x = self.apply_layer(layer, x, None, input_pads)
        y = self.embed(F.pad(self._vectors(targets[:, :-1]), (0, 0, 1, 0)))
        causal = self.causal[: targets.shape[1], : targets.shape[1]]
        for layer in self.decoder:
            y = self.apply_layer(layer, y, x, causal, None, target_pads, input_pads, True)
        return y

    def _vectors(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)

    def embed(self, vectors: Tensor) -> Tensor:
        return self.dropout(vectors + self.positions[: vectors.shape[1]])

    def apply_layer(self, layer: nn.Module, *arguments: Any) -> Tensor:
        return layer(*arguments)

    def read(self, state: Mapping[str, np.ndarray]) -> None:
        """Loads parameters that have the names of `t2t_jax.interop.torch_names`."""
        found = {name: torch.from_numpy(np.array(_find(name, state))) for name in self.state_dict()}
        self.load_state_dict(found)


def _layer(kind: type[nn.Module], shape: Mapping[str, Any]) -> nn.Module:
    """A layer with dropout on the sub-layer outputs only, as in the paper; not on attention weights or hidden units."""
    d_model, heads = shape["d_model"], shape["num_heads"]
    layer = kind(
        d_model, heads, shape["d_ff"], shape["dropout"], layer_norm_eps=shape["layer_norm_epsilon"], batch_first=True
    )
    layer.dropout = nn.Identity()
    for name in ("self_attn", "multihead_attn"):
        if hasattr(layer, name):
            setattr(layer, name, nn.MultiheadAttention(d_model, heads, bias=False, batch_first=True))
    return layer


def _sinusoids(length: int, d_model: int) -> Tensor:
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(0, d_model, 2) / d_model)
    return torch.from_numpy(np.stack([np.sin(angles), np.cos(angles)], -1).reshape(length, d_model).astype(np.float32))


def _find(name: str, state: Mapping[str, np.ndarray]) -> np.ndarray:
    stack, index, *rest = name.split(".")
    if stack == "embedding":
        return state["embed_tokens.weight"]
    prefix, (module, *end) = f"{stack}.layers.{index}", rest
    prefix = f"{prefix}.{_NAMES[stack].get(module, module)}"
    if end == ["in_proj_weight"]:
        return np.concatenate([state[f"{prefix}.{projection}_proj.weight"] for projection in "qkv"])
    return state[".".join([prefix, *end])]


def _cross_entropy(y: Tensor, table: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    logits = F.linear(y, table).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=0, label_smoothing=label_smoothing)


class Trainer:
    """The model, Adam and the training step.

    `tuned`: fused Adam, and no padding mask where no real token attends to padding; otherwise the plain version.
    bfloat16 means autocast. Float32 matrix products may use TF32 on GPUs, as XLA's do. `compiled` is "", "whole" or
    "regions": the embedding, a layer of each kind and the loss each by itself, which takes a quarter of the time and
    makes a step 2 % slower (measured on a CPU). With `several_shapes` of batches, once for all shapes.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        label_smoothing: float,
        dtype: str,
        tuned: bool,
        compiled: str,
        several_shapes: bool = False,
    ):
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model, self._label_smoothing, self._tuned = model.to(self._device), label_smoothing, tuned
        self._dtype = getattr(torch, dtype)
        self._cross_entropy = _cross_entropy
        compile_ = functools.partial(torch.compile, dynamic=several_shapes or None)
        if compiled == "whole":
            self._loss = compile_(self._loss)
        elif compiled == "regions":
            self._cross_entropy = compile_(_cross_entropy)
            model.embed, model.apply_layer = compile_(model.embed), compile_(model.apply_layer)
        fused = {"fused": True} if tuned else {}
        self._adam = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, **fused)
        torch.backends.cuda.matmul.allow_tf32 = True

    def put(self, batch: Batch) -> dict[str, Tensor | None]:
        """The arguments of the model, on the device."""
        ids = {name: torch.from_numpy(batch[name].astype(np.int64)).to(self._device) for name in ("inputs", "targets")}
        pads = {"input_pads": ids["inputs"] == 0, "target_pads": ids["targets"] == 0}
        if self._tuned:
            # Padding is on the right, so under the causal mask no real target attends to it.
            pads = {"input_pads": pads["input_pads"] if pads["input_pads"].any() else None, "target_pads": None}
        return ids | pads

    def train(self, batches: list[dict[str, Tensor | None]]) -> float:
        """Takes a step for each batch and returns the last loss."""
        for batch in batches:
            loss = self._gradients(batch)
            self._adam.step()
        self._wait()
        return float(loss)

    def check(self, batch: dict[str, Tensor | None]) -> tuple[float, float]:
        """(loss, gradient norm), without dropout, compilation and TF32."""
        torch.backends.cuda.matmul.allow_tf32 = False
        self._model.eval()
        with torch.compiler.set_stance("force_eager"):
            loss = self._gradients(batch)
        norm = torch.sqrt(sum(p.grad.square().sum() for p in self._model.parameters()))
        self._model.train()
        torch.backends.cuda.matmul.allow_tf32 = True
        return float(loss), float(norm)

    def multiply_matrices(self, size: int, count: int) -> None:
        """Multiplies square matrices `count` times."""
        x = torch.randn(size, size, device=self._device, dtype=self._dtype)
        for _ in range(count):
            x @ x
        self._wait()

    def _gradients(self, batch: dict[str, Tensor | None]) -> Tensor:
        """Computes the loss, and the gradients into the parameters' `grad`."""
        self._adam.zero_grad(set_to_none=True)
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            loss = self._loss(**batch)
        loss.backward()
        return loss.detach()

    def _loss(self, **batch: Tensor | None) -> Tensor:
        y = self._model(**batch)
        return self._cross_entropy(y, self._model.embedding.weight, batch["targets"], self._label_smoothing)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
