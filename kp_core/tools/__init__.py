"""What a model may call, the form of its answers in each model family, and how answers are read."""

from kp_core.tools.base import Delta, JsonScan, Scores, TokenLogprob, Tool, ToolCall, ToolCallDelta, ToolChoice
from kp_core.tools.formats import HARMONY, THINK, Thought, ToolFormat, format_of, thought_of
from kp_core.tools.reader import AnswerReader, HarmonyReader
from kp_core.tools.shape import AnswerShape

__all__ = [
    "HARMONY",
    "THINK",
    "AnswerReader",
    "AnswerShape",
    "Delta",
    "HarmonyReader",
    "JsonScan",
    "Scores",
    "Thought",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolFormat",
    "format_of",
    "thought_of",
]
