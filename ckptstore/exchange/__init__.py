"""Import `.safetensors` files, `.pt` files and trainers' folders; export `.safetensors` and `.pt` files.

This room imports `write` and the rooms below it.
"""
