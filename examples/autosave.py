"""Shows: a plain training loop that can be killed at any moment and goes on exactly where it was.

Run:   python examples/autosave.py --directory /tmp/ckpt
       (kill it, with Ctrl-C or kill -9, and run it again)

The three lines that make it so are marked. It prints the loss now and then, and at the end a
fingerprint of the model, which is the same however often it was killed.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import everstep


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="ckpt")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()

    torch.set_num_threads(1)  # A model this small gains nothing from more.
    torch.manual_seed(0)
    loader = DataLoader(spirals(1000), batch_size=32, shuffle=True)
    model = nn.Sequential(
        nn.Linear(2, 256),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

    saver = everstep.Autosave(  # 1
        model=model, optimizer=optimizer, scheduler=scheduler, directory=options.directory
    )
    if saver.resumed_from is not None:
        print(f"goes on after step {saver.resumed_from}")
    for step, (points, labels) in saver.steps(loader, total=options.steps):  # 2
        loss = nn.functional.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        saver.report(loss)  # 3
        if step % 500 == 499:
            print(f"step {step + 1:5}  loss {loss.item():.3f}")

    saved = [event for event in saver.events if event["event"] == "checkpoint"]
    print(f"{len(saved)} checkpoints in this run; the model is {fingerprint(model)}")


def spirals(number: int) -> TensorDataset:
    """Two arms of points, wound around each other: which arm is it?"""
    labels = torch.arange(number) % 2
    turn = torch.linspace(0.5, 9, number)
    angle = turn + torch.pi * labels
    points = torch.stack((turn * angle.cos(), turn * angle.sin()), dim=1) / 9
    return TensorDataset(points + 0.02 * torch.randn(number, 2), labels)


def fingerprint(model: nn.Module) -> str:
    seen = hashlib.sha256()
    for tensor in model.state_dict().values():
        seen.update(tensor.numpy().tobytes())
    return seen.hexdigest()[:12]


if __name__ == "__main__":
    main()
