"""Training scripts as people have them, before and after: docs/checkpointer.md shows what changes."""
