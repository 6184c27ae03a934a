"""What the tests of this room reach inside an `AgentWriter` for; see each function."""

from __future__ import annotations

from ckptstore.agent import AgentWriter

__all__ = ["answers", "delivered"]


def delivered(writer: AgentWriter, step: int) -> None:
    """Return when all saves up to `step` have reached the agent. What is public waits until they are durable."""
    writer._agent_term.agent.link.call("hurry", step=step)


def answers(writer: AgentWriter) -> bool:
    """Whether an agent that was stopped is heard again. In public only a save would tell, and fail before."""
    return writer._agent_term.agent.link.silent is None
