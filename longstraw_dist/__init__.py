"""longstraw-dist: exact shared-prompt RL post-training over DeepSpeed ZeRO-3 and FSDP2."""

from .attach import attach, recover
from .capture import Capture
from .config import LongStrawConfig
from .groups import PromptGroup
from .output import LongStrawOutput

__all__ = ["Capture", "LongStrawConfig", "LongStrawOutput", "PromptGroup", "attach", "recover"]
