"""The agent: a separate process that owns buffers, term and newest state, and saves for a trainer. And its client.

Imports `store`, `write`, `restore`, `segments` and what is below; importing the package itself imports nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptstore.agent.client.agent_link import SilentAgentWarning
    from ckptstore.agent.client.agent_term import AgentRestartWarning
    from ckptstore.agent.client.agent_writer import AgentWriter
    from ckptstore.agent.client.inherited_state import Inherited
    from ckptstore.agent.client.open_agent_writer import writer

_HOME = {
    "AgentRestartWarning": "agent_term",
    "AgentWriter": "agent_writer",
    "Inherited": "inherited_state",
    "SilentAgentWarning": "agent_link",
    "writer": "open_agent_writer",
}

__all__ = ["AgentRestartWarning", "AgentWriter", "Inherited", "SilentAgentWarning", "writer"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'ckptstore.agent' has no attribute {name!r}")
    value = getattr(import_module(f"ckptstore.agent.client.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
