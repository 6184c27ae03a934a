"""Does every step come back? A real training run in step diffs, restored and resumed at random steps, by bits."""
