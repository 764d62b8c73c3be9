"""What a layer must remember of a prompt. A new kind of layer adds a file here: a state, and the view onto it."""

from .attention import Captured, KeyValueState, View

__all__ = ["Captured", "KeyValueState", "View"]
