"""Run the conformance set against an executable: ``python -m tools.conformance [--set JSON] COMMAND ...``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from tools.conformance.comparing import differences

SET = Path(__file__).resolve().parents[2] / "tests" / "golden" / "conformance" / "conformance-1.json"


def main(arguments: list[str]) -> int:
    """Run every store -> how many answers were wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance", description=__doc__)
    parser.add_argument("--set", type=Path, default=SET, help="the JSON with the expected answers")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each store")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the command to test; the path of a store is appended"
    )
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("name the executable to test")
    wrong = 0
    for name, store in json.loads(options.set.read_text())["stores"].items():
        found = _run([*options.command, str(options.set.parent / name)], options.timeout)
        reasons = [found] if isinstance(found, str) else differences(store["expected"], found)
        wrong += bool(reasons)
        print(f"{'FAIL' if reasons else 'ok  '}  {name:20} {store['about']}")
        for reason in reasons[:10]:
            print(f"        {reason}")
    print(f"{wrong} wrong" if wrong else "all as expected")
    return wrong


def _run(command: list[str], seconds: float) -> object:
    """The answer of an executable, or text that says why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no answer: {error}"
    about = f"exit status {done.returncode}, {done.stderr.decode(errors='replace')[-200:]!r}"
    if done.returncode:  # Prevents: half an answer, printed before a crash, that passes.
        return f"failed: {about}; it is 0 with every answer, also a refusal"
    try:
        return json.loads(done.stdout)
    except ValueError:
        return f"no answer: {about}"


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
