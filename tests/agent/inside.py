"""Private parts of an `AgentWriter` that the tests of this room use; each function states why."""

from __future__ import annotations

from ckptstore.agent import AgentWriter

__all__ = ["answers", "delivered"]


def delivered(writer: AgentWriter, step: int) -> None:
    """Return when all saves up to `step` have reached the agent. The public calls wait until they are durable."""
    writer._agent_term.agent.link.call("hurry", step=step)


def answers(writer: AgentWriter) -> bool:
    """Whether an agent that was stopped answers again. Publicly only a save would show it, and fail before."""
    return writer._agent_term.agent.link.silent is None
