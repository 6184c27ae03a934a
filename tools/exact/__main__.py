"""``python -m tools.exact``: 1,000 steps as step diffs, 50 restored, 50 resumed; exits with 1 on one wrong bit."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import click

import ckptstore
from tools.exact.recovery import HORIZON, choose, restore, resume, train
from tools.exact.training import Recipe

_RUNS = (Recipe(norm="batch"), Recipe(norm="layer", optimizer="foreach", gradients="none"))


@click.command(help=__doc__.splitlines()[0])
@click.option("--steps", default=1000, show_default=True, help="Steps to train, each a checkpoint.")
@click.option("--restores", default=50, show_default=True, help="Random steps to restore and compare.")
@click.option(
    "--resumes", default=50, show_default=True, help=f"Random steps from which a run continues for {HORIZON} steps."
)
@click.option("--full-every", default=100, show_default=True)
@click.option("--batch", default=20, show_default=True, help="Steps written at once.")
@click.option("--json", "report", type=click.Path(path_type=Path), help="Write the numbers here.")
def main(steps: int, restores: int, resumes: int, full_every: int, batch: int, report: Path | None) -> None:
    rows, wrong = [], False
    for base in _RUNS:
        recipe = Recipe(base.norm, base.optimizer, base.gradients, steps=steps)
        with tempfile.TemporaryDirectory(prefix="ckptstore-exact-") as folder:
            url = str(Path(folder) / "store")
            options = ckptstore.DiffOptions(full_every=full_every, batch=batch, seconds=None)
            click.echo(f"{recipe.norm} norm, {recipe.optimizer} AdamW, gradients={recipe.gradients!r}: {steps} steps")
            trained = train(url, recipe, options)
            bits = 8 * trained.stored_bytes / steps / trained.parameters
            click.echo(
                f"  loss {trained.first_loss:.3f} -> {trained.last_loss:.3f}, {trained.parameters} parameters; "
                f"{trained.seconds:.1f} s, {trained.seconds_in_saves:.1f} s of them in save_async; "
                f"{trained.stored_bytes / 1e6:.1f} MB, {bits:.1f} bits a parameter and step with the fulls"
            )
            restored = restore(url, choose(recipe, restores), trained.fingerprints)
            click.echo(f"  restored {restored.compared}, wrong {restored.wrong}; {restored.seconds:.3f} s each")
            resumed = resume(url, recipe, choose(recipe, resumes, HORIZON, 2), trained.fingerprints)
            click.echo(f"  resumed {resumed.compared}, wrong {resumed.wrong}; {HORIZON} steps each")
            wrong = wrong or bool(restored.wrong or resumed.wrong)
            entry = asdict(trained) | {"fingerprints": len(trained.fingerprints), "bits": bits}
            rows.append({"recipe": asdict(recipe), **entry, "restored": asdict(restored), "resumed": asdict(resumed)})
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(rows, indent=1))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
