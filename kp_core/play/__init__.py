"""The playground, `kp play`: see in a browser what packs do, before writing a line of code."""

from kp_core.play.agent import Agent, Step
from kp_core.play.world import SAMPLE, Answer, Document, Question, World

__all__ = ["SAMPLE", "Agent", "Answer", "Document", "Question", "Step", "World"]
