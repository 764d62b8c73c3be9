"""What a layer must remember of a prompt."""

from .prompt import PromptState
from .view import Captured, View

__all__ = ["Captured", "PromptState", "View"]
