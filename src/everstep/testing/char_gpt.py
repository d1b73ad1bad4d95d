"""A small character-level GPT and real text to train it on: Python's own standard library.

For demos, tests and benchmarks. Real enough to converge, small enough for a laptop's processor.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

ALPHABET = bytes(range(32, 127)) + b"\n\t"
"""What is kept of the text; everything else becomes a space."""

_MODULES = ("argparse", "ast", "inspect", "pathlib", "random", "socket", "threading", "typing")


@cache
def library_text() -> bytes:
    """The sources of a few modules, joined."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"\n".join((folder / f"{name}.py").read_bytes() for name in _MODULES)


@cache
def _encoded() -> Tensor:
    codes = torch.zeros(256, dtype=torch.long)
    codes[list(ALPHABET)] = torch.arange(len(ALPHABET))
    return codes[torch.frombuffer(bytearray(library_text()), dtype=torch.uint8).long()]


class Characters:
    """`dataset[i]` is (characters, the same shifted by one) of window i of the text."""

    def __init__(self, *, length: int = 32, first: int = 0, last: int | None = None) -> None:
        num_windows = (len(_encoded()) - 1) // length
        self._windows = range(num_windows)[first:last]
        self._length = length

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = self._windows[index] * self._length
        window = _encoded()[start : start + self._length + 1]
        return window[:-1], window[1:]


class Embedding(nn.Module):
    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[-1], device=tokens.device)
        embedded: Tensor = self.tokens(tokens) + self.places(places)
        return embedded


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        # No bias: that of the keys has no gradient but rounding noise, which Adam would blow up.
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(self.norm_attention(x))
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in split.chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self.feed_forward(x)
        return y


def char_gpt(
    *, width: int = 32, heads: int = 2, blocks: int = 4, length: int = 32, dropout: float = 0.1
) -> nn.Sequential:
    return nn.Sequential(
        Embedding(width, length),
        *(Block(width, heads, dropout) for _ in range(blocks)),
        nn.LayerNorm(width),
        nn.Linear(width, len(ALPHABET)),
    )


def next_character_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())
