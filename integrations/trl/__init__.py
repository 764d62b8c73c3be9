"""TRL's GRPOTrainer with shared prompts: change the two class names in a TRL script, and it runs."""

from .config import LongStrawGRPOConfig
from .trainer import LongStrawGRPOTrainer

__all__ = ["LongStrawGRPOConfig", "LongStrawGRPOTrainer"]
