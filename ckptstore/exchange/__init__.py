"""Import `.safetensors` files, `.pt` files and trainers' folders; export `.safetensors` and `.pt` files.

Imports `write` and the rooms below it.
"""
