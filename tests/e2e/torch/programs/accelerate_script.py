"""A script of Accelerate, which finds the group that was made before it."""

from __future__ import annotations

from typing import Any

import torch
from tests.e2e.torch.programs.models import WIDTH, digest, network
from torch.utils.data import DataLoader, TensorDataset


def main() -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    data = TensorDataset(torch.randn(18, WIDTH, generator=torch.Generator().manual_seed(1)))
    inner = network()
    model, optimizer, loader = accelerator.prepare(
        inner, torch.optim.AdamW(inner.parameters(), lr=1e-2), DataLoader(data, batch_size=3)
    )
    losses = []
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).tolist())
    accelerator.wait_for_everyone()
    ranks = [accelerator.process_index, accelerator.num_processes]
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()  # the programs after this one share the process
    return [losses, digest(inner), ranks]
