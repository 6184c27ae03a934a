"""Fuzzes every reader of unchecked bytes.

``python -m tools.fuzz --seconds 60`` (``make fuzz``). `targets` has the readers and their invariants, `seeds` valid
inputs, `mutations` ways to damage them; `guard` checks one run for time, memory and foreign errors; `campaign` runs
each target in its own process, guided by coverage if atheris is installed.
"""
