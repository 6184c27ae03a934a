"""Doors for training frameworks: Hugging Face's Trainer. Each module needs its framework.

Imports `training` and the rooms below it.
"""
