"""Fuzzing of everything that reads bytes nobody has checked.

``python -m tools.fuzz --seconds 60`` (``make fuzz``). `targets` says what is read and what must hold, `seeds` what
valid input looks like, `mutations` how it is damaged; `guard` watches one run for time, memory and foreign errors;
`campaign` runs a target in processes of its own, guided by coverage where atheris is installed.
"""
