"""The conformance set: stores and what has to come out of them, for readers in any language."""
