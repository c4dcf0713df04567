"""The optimiser and the learning rate of each step."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from txl.errors import ConfigError

SCHEDULES = ("cosine", "linear", "constant")
OPTIMISERS = ("adam", "adamw", "sgd")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser; the defaults are the original's for enwik8."""

    name: str = "adam"
    """"adam", "adamw" or "sgd", torch's own."""
    lr: float = 2.5e-4
    """Learning rate after warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from lr / warmup_steps to lr, the first update included."""
    schedule: str = "cosine"
    """After warm-up: "cosine" or "linear" down to min_lr at the last step, or "constant"."""
    min_lr: float = 0.0
    """Learning rate at the end of the schedule."""
    clip: float = 0.25
    """Largest norm of the gradient over all parameters; 0 is off."""
    weight_decay: float = 0.0
    """Decay of matrices; biases, norms, u and v are spared. L2 for adam and sgd, decoupled for adamw."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """Adam's decay rates of the first and second moments."""
    momentum: float = 0.0
    """Momentum of sgd."""

    def __post_init__(self):
        if self.name not in OPTIMISERS:
            raise ConfigError(f'optim.name must be one of {", ".join(OPTIMISERS)}, got "{self.name}"')
        if self.schedule not in SCHEDULES:
            raise ConfigError(f'optim.schedule must be one of {", ".join(SCHEDULES)}, got "{self.schedule}"')
        for name in ("lr", "warmup_steps", "min_lr", "clip", "weight_decay", "momentum"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"optim.{name} must be at least 0 and finite, got {value}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas must be two numbers in [0, 1), got {list(self.betas)}")


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The learning rate of update number `step`, counted from 0, of `steps` in all."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min((step - config.warmup_steps) / max(steps - config.warmup_steps, 1), 1.0)
    fraction = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * fraction


def make_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """torch's optimiser over the model's parameters, in two groups: with and without weight decay."""
    spared = {"u", "v"}
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() > 1 and name.rpartition(".")[2] not in spared
        (decayed if matrix else plain).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    optimizer = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return optimizer(groups, lr=config.lr, betas=config.betas, fused=True)
