"""Tools, schemas and reasoning: what a model is offered, what its answer may look like, and how that is read."""

from kp_core.tools.base import Delta, Tool, ToolCall, ToolCallDelta, ToolChoice
from kp_core.tools.formats import FORMATS, ToolFormat, format_of
from kp_core.tools.reader import AnswerReader
from kp_core.tools.shape import AnswerShape

__all__ = [
    "FORMATS",
    "AnswerReader",
    "AnswerShape",
    "Delta",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolFormat",
    "format_of",
]
