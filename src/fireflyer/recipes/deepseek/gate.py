"""The gate of DeepSeekMoE: which experts a token goes to, with which weights (DeepSeek-V3, 2.1.2 and 4.3).

    s = sigmoid(x W^T)                    scores
    c = s + b                             b, the bias, decides about the choice only
    group score = sum of the 2 largest c of a group; keep the best groups, then the experts with the largest c in them
    weights = s of the chosen, divided by their sum, times the scaling

No loss balances the experts: once a step the bias of each is moved by a constant, up where it got fewer tokens than the
mean, down where it got more. The counts are those of all micro-batches; who trains on several ranks adds them up.
"""

from __future__ import annotations

import contextlib
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fireflyer.base.errors import UsageError
from fireflyer.codesign.model import Experts
from fireflyer.recipes.deepseek.config import DeepseekConfig
from fireflyer.training.reducer import in_backward

__all__ = ["BIAS_STEP", "Gate", "Routing", "choose_experts"]

BIAS_STEP: Final = 1e-3
"""How far a bias moves in a step (DeepSeek-V3, 4.2)."""


class Routing(NamedTuple):
    """Experts of N tokens, K of each, in no order."""

    indices: Tensor
    """`[N, K]` int64: numbers of experts among all of the layer."""
    weights: Tensor
    """`[N, K]`, fp32 or wider."""


class Gate(nn.Module):
    """Gate of one layer. Scores are computed in fp32, or in fp64 for a model in fp64; so they are under autocast."""

    e_score_correction_bias: Tensor
    counts: Tensor

    def __init__(self, config: DeepseekConfig, experts: Experts) -> None:
        super().__init__()
        self.sizes = experts
        self.scaling, self.renormalised = config.routed_scaling, config.renormalised
        self.weight = nn.Parameter(torch.empty(experts.routed, config.shape.hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts.routed, dtype=torch.float32))
        self.register_buffer("counts", torch.zeros(experts.routed, dtype=torch.int64), persistent=False)

    def forward(self, tokens: Tensor, indices: Tensor | None = None) -> Routing:
        """Routing of `tokens [N, h]`. `indices [N, K]`: take these experts, with the weights that the scores give."""
        wide = torch.promote_types(tokens.dtype, torch.float32)
        with _without_autocast(tokens.device.type):  # which would cast both back
            scores = functional.linear(tokens.to(wide), self.weight.to(wide)).sigmoid()
        if indices is None:
            indices = choose_experts(scores.detach() + self.e_score_correction_bias, self.sizes)
        elif indices.shape != (len(tokens), self.sizes.per_token):
            raise UsageError(
                f"replayed routing has shape {tuple(indices.shape)}; {len(tokens)} tokens go to "
                f"{self.sizes.per_token} experts each"
            )
        if self.training and not in_backward():  # a forward that is recomputed is in the counts already
            self.counts += torch.bincount(indices.flatten(), minlength=self.sizes.routed)
        weights = scores.gather(1, indices)
        if self.renormalised:
            weights = weights / (weights.sum(dim=1, keepdim=True) + 1e-20)
        return Routing(indices, weights * self.scaling)

    @torch.no_grad()
    def move_bias(self, counts: Tensor, step: float = BIAS_STEP) -> None:
        """Moves the bias by the tokens `counts [E]` that the experts got in the last step, and counts anew."""
        counts = counts.to(device=self.counts.device, dtype=torch.float64)
        if self.e_score_correction_bias.dtype.itemsize < torch.float32.itemsize:
            # A bias in bf16 would not take steps of 1e-3: it is fp32, whatever the model was cast to.
            self.e_score_correction_bias = self.e_score_correction_bias.float()
        self.e_score_correction_bias += step * torch.sign(counts.mean() - counts)
        self.counts.zero_()


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """No autocast on a device of this type; on `meta` there is none to switch off."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def choose_experts(choice: Tensor, experts: Experts) -> Tensor:
    """Indices `[N, K]` of the experts with the largest `choice [N, E]` in the best groups of each token."""
    groups, per_group = experts.groups, experts.routed // experts.groups
    if experts.groups_per_token < groups:
        grouped = choice.view(-1, groups, per_group)
        best = grouped.topk(min(2, per_group), dim=2).values.sum(dim=2).topk(experts.groups_per_token, dim=1).indices
        kept = torch.zeros_like(choice[:, :groups], dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~kept.unsqueeze(2), float("-inf")).flatten(1)
    return choice.topk(experts.per_token, dim=1).indices
