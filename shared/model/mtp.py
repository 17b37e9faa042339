"""A multi-token prediction layer as DeepSeek-V3 describes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shared.model.attention import Attend, RmsNorm, Rotation
from shared.model.config import ModelConfig


class MtpLayer(nn.Module):
    """eh_proj([enorm(e); hnorm(h)]) → decoder layer → shared_head.norm. Embedding and output head are the trunk's."""

    def __init__(self, config: ModelConfig, layer: nn.Module) -> None:
        super().__init__()
        self.enorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = layer
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, index: int, embedded_ND: Tensor, hidden_ND: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        joined = torch.cat((self.enorm(embedded_ND), self.hnorm(hidden_ND)), -1)
        out, _ = self.layer(index, self.eh_proj(joined), rotation, attend)
        return self.norm(out)
