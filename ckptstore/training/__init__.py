"""What needs torch: tensors and digests where they live. The only part of the engine that imports torch."""
