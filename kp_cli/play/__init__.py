"""The playground, `kp play`: see in a browser what packs do, before writing a line of code."""

from kp_cli.play.agent import Agent, Step
from kp_cli.play.world import SAMPLE, Answer, Document, Question, World

__all__ = ["SAMPLE", "Agent", "Answer", "Document", "Question", "Step", "World"]
