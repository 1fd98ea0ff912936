"""Tools, schemas and reasoning: what a model is offered, the allowed form of its answer, and how answers are read."""

from kp_core.tools.base import Delta, Tool, ToolCall, ToolCallDelta, ToolChoice
from kp_core.tools.formats import FORMATS, HARMONY, THINK, Thought, ToolFormat, format_of, thought_of
from kp_core.tools.harmony import HarmonyReader
from kp_core.tools.reader import AnswerReader
from kp_core.tools.shape import AnswerShape

__all__ = [
    "FORMATS",
    "HARMONY",
    "THINK",
    "AnswerReader",
    "AnswerShape",
    "Delta",
    "HarmonyReader",
    "Thought",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolFormat",
    "format_of",
    "thought_of",
]
