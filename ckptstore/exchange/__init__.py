"""Files of other tools: `.safetensors`, `.pt` and trainers' folders in, `.safetensors` and `.pt` out.

Imports `write` and what is below it.
"""
