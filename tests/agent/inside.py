"""Private parts of an `AgentWriter` that the tests of this room use; each function states why."""

from __future__ import annotations

from concurrent.futures import Future

from ckptstore.agent import AgentWriter

__all__ = ["answers", "ask_beside", "delivered"]


def ask_beside(writer: AgentWriter, step: int) -> Future[bool]:
    """Have the thread beside the receiving one ask the agent, as `PendingSave.result` does, and wait for the answer.

    When it does so no call shows.
    """
    return writer._agent_term.beside.submit(writer._agent_term._ask_quietly, "hurry", step)


def delivered(writer: AgentWriter, step: int) -> None:
    """Return when all saves up to `step` have reached the agent. The public calls wait until they are durable."""
    writer._agent_term.agent.link.call("hurry", step=step)


def answers(writer: AgentWriter) -> bool:
    """Whether an agent that was stopped answers again. Publicly only a save would show it, and fail before."""
    return writer._agent_term.agent.link.silent is None
