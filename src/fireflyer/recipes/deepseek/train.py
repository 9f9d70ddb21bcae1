"""Trains the small model on the corpus of the demonstration, in one process: `python -m
fireflyer.recipes.deepseek.train`.

It prints the losses of the next token and of the prediction module, the largest load of an expert over the mean of its
layer, and at the end how often drafts of the trained module are accepted. The script is meant to be read and copied; it
saves nothing unless `--save` names a directory for the files of Hugging Face.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from fireflyer.base.errors import FireflyerError, UsageError
from fireflyer.data import PrefetchLoader, ResumableSampler, TokenWindows
from fireflyer.recipes.corpus import DEFAULT_MAX_BYTES, build_corpus
from fireflyer.recipes.deepseek.config import PRESETS, DeepseekConfig
from fireflyer.recipes.deepseek.decoding import speculate
from fireflyer.recipes.deepseek.model import DeepseekModel
from fireflyer.recipes.deepseek.weights import save_weights

__all__ = ["StepFigures", "main", "train_steps"]

_WARM_UP_STEPS = 20
_MAX_GRADIENT_NORM = 1.0
_DRAFT_TOKENS = 64


class StepFigures(msgspec.Struct, frozen=True):
    """What one step showed."""

    step: int
    loss: float
    """Cross entropy of the next token, mean over tokens."""
    mtp_loss: float
    """Of the first prediction module."""
    overload: float
    """Tokens of the expert with the most, over the mean of its layer."""


def train_steps(
    model: DeepseekModel, batches: Iterator[tuple[Tensor, Tensor]], *, steps: int, learning_rate: float = 3e-3
) -> Iterator[StepFigures]:
    """Trains `model` for `steps` steps on `batches` of inputs and targets `[B, T]`, and yields each step's figures."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, steps + 1):
        inputs, targets = next(batches)
        losses = model.losses(inputs, targets)
        (losses.total() / inputs.numel()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRADIENT_NORM)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, step / _WARM_UP_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        counts = model.expert_counts().double()
        model.move_biases(counts)
        yield StepFigures(
            step=step,
            loss=losses.main.item() / inputs.numel(),
            mtp_loss=losses.mtp[0].item() / targets[:, 1:].numel() if losses.mtp else float("nan"),
            overload=float((counts.amax(1) / counts.mean(1)).max()),
        )


def main(arguments: Sequence[str] | None = None, say: Callable[[str], object] = print) -> int:
    """Runs the script and returns its exit code; an error is one line on stderr."""
    given = _parser().parse_args(arguments)
    try:
        _run(given, say)
    except FireflyerError as error:
        print(f"deepseek.train: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def _run(given: argparse.Namespace, say: Callable[[str], object]) -> None:
    if given.steps < 1 or given.batch < 1:
        raise UsageError(f"--steps {given.steps} and --batch {given.batch} must be at least 1")
    corpus = build_corpus(given.corpus_dir, max_bytes=given.corpus_bytes)
    config = _sized(PRESETS[given.preset], corpus.vocab_size, given.seed)
    model = DeepseekModel(config)
    count = config.parameters
    say(f"{count.total + count.mtp:,} parameters, {count.active:,} of them used by one token; {corpus}")
    windows = TokenWindows(corpus.records(), given.sequence_length, vocab_size=corpus.vocab_size)
    sampler = ResumableSampler(len(windows), global_batch=given.batch, seed=given.seed)
    with PrefetchLoader(windows, sampler) as loader:
        batches = ((batch.tensors[0], batch.tensors[1]) for batch in loader)
        for seen in train_steps(model, batches, steps=given.steps, learning_rate=given.lr):
            if seen.step % 10 == 0 or seen.step in (1, given.steps):
                say(
                    f"step {seen.step} of {given.steps}, loss {seen.loss:.4f}, prediction module {seen.mtp_loss:.4f}, "
                    f"busiest expert {seen.overload:.2f} x mean"
                )
    model.eval()
    found = speculate(model, windows[0][0][:16].unsqueeze(0), _DRAFT_TOKENS)
    say(f"drafts accepted: {found.acceptance_rate:.0%}, {found.forwards} forwards for {_DRAFT_TOKENS} tokens")
    if given.save:
        save_weights(model, given.save)
        say(f"saved to {given.save}")


def _sized(config: DeepseekConfig, vocabulary: int, seed: int) -> DeepseekConfig:
    shape = msgspec.structs.replace(config.shape, vocabulary=vocabulary)
    return msgspec.structs.replace(config, shape=shape, seed=seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deepseek.train", description="Train a small DeepSeek-V3 on Python sources.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate after warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small", help="size of the model")
    parser.add_argument("--corpus-dir", default="corpus", help="where the corpus is, or will be built")
    parser.add_argument("--corpus-bytes", type=int, default=DEFAULT_MAX_BYTES, help="text to build it of")
    parser.add_argument("--save", help="directory for config.json and weights")
    return parser


if __name__ == "__main__":
    sys.exit(main())
