"""Shows: how the loss of five small models really falls, step by step, for the placement benchmark.
Run:   python benchmarks/record_loss_curves.py          (about four minutes of one core)

Writes `loss_curves/NAME.csv` with the training loss of every step. The GPT reads real text (the
sources of Python's standard library); the conv net and the LSTM learn made-up but learnable data,
because no dataset is downloaded. `lr-drop` is the conv net with its learning rate cut to a tenth
half-way; `diverging` is the GPT with a learning rate that is raised until it blows up.
"""

from __future__ import annotations

import csv
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from everstep.testing.char_gpt import Characters, char_gpt, next_character_loss

FOLDER = Path(__file__).parent / "loss_curves"
STEPS = 3000
BATCH = 16

Batches = Iterator[tuple[Tensor, Tensor]]
LearningRate = Callable[[int], float]


def gpt(learning_rate: LearningRate) -> Iterator[float]:
    data = Characters()
    places = torch.Generator().manual_seed(1)

    def batches() -> Batches:
        while True:
            chosen = torch.randint(len(data), (BATCH,), generator=places).tolist()
            inputs, targets = zip(*(data[index] for index in chosen), strict=True)
            yield torch.stack(inputs), torch.stack(targets)

    model = char_gpt(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters())
    return losses(model, optimizer, batches(), next_character_loss, learning_rate)


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )


def conv_net(learning_rate: LearningRate) -> Iterator[float]:
    """Ten kinds of coloured textures, shifted, dimmed and noisy, a tenth of them mislabelled."""
    draw = torch.Generator().manual_seed(2)
    textures = functional.interpolate(torch.randn(10, 3, 6, 6, generator=draw), size=16)

    def batches() -> Batches:
        while True:
            kinds = torch.randint(10, (4 * BATCH,), generator=draw)
            shift = int(torch.randint(16, (1,), generator=draw))
            light = 0.3 + torch.rand(len(kinds), 1, 1, 1, generator=draw)
            images = light * textures[kinds].roll(shift, dims=-1)
            images = images + 1.5 * torch.randn(images.shape, generator=draw)
            is_wrong = torch.rand(len(kinds), generator=draw) < 0.1
            other = torch.randint(10, kinds.shape, generator=draw)
            yield images, torch.where(is_wrong, other, kinds)

    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=1e-4)
    return losses(model, optimizer, batches(), functional.cross_entropy, learning_rate)


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.memory = nn.LSTM(16, 48, batch_first=True)
        self.head = nn.Linear(48, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.memory(self.embedding(tokens))
        logits: Tensor = self.head(hidden)
        return logits


def lstm(learning_rate: LearningRate) -> Iterator[float]:
    """Sequences of a random source of order two over eight signs: predict the next sign."""
    draw = torch.Generator().manual_seed(3)
    chances = functional.softmax(2.5 * torch.randn(8, 8, 8, generator=draw), dim=-1)

    def batches() -> Batches:
        while True:
            signs = [torch.randint(8, (2 * BATCH,), generator=draw) for _ in range(2)]
            for _ in range(24):
                odds = chances[signs[-2], signs[-1]]
                signs.append(torch.multinomial(odds, 1, generator=draw).squeeze(1))
            tokens = torch.stack(signs, dim=1)
            yield tokens[:, :-1], tokens[:, 1:]

    model = Remembering()
    optimizer = torch.optim.Adam(model.parameters())
    return losses(model, optimizer, batches(), next_character_loss, learning_rate)


def losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    learning_rate: LearningRate,
) -> Iterator[float]:
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        inputs, targets = next(batches)
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()


RECORDINGS: dict[str, Callable[[], Iterator[float]]] = {
    "gpt": lambda: gpt(lambda _: 2e-3),
    "conv-net": lambda: conv_net(lambda _: 2e-3),
    "lstm": lambda: lstm(lambda _: 3e-3),
    "lr-drop": lambda: conv_net(lambda step: 1.5 if step < STEPS // 2 else 0.15),
    "diverging": lambda: gpt(lambda step: 2e-3 if step < 1200 else 2e-3 * 1.01 ** (step - 1200)),
}


def main() -> int:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RECORDINGS:
        torch.manual_seed(0)
        begin = time.perf_counter()
        recorded = list(RECORDINGS[name]())
        with (FOLDER / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("step", "loss"))
            # A loss that is no number ends the recording: nothing is learnt after it.
            for step, loss in enumerate(recorded):
                if not math.isfinite(loss):
                    break
                rows.writerow((step, f"{loss:.5f}"))
        seconds = time.perf_counter() - begin
        print(f"{name:10} {recorded[0]:8.3f} -> {recorded[-1]:8.3f} in {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
