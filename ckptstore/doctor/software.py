"""Check Python and the required and optional packages: their versions, and whether they load."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from typing import Final

from ckptstore.doctor.findings import Finding, Verdict
from ckptstore.errors import CkptError

__all__ = ["examine_software"]

_REQUIREMENT: Final = re.compile(
    r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?:>=\s*([0-9.]+))?[^;]*(?:;\s*extra\s*==\s*['\"]([\w.-]+)['\"])?"
)
_OPTIONAL: Final = {
    "s3": "needed for s3://, gs:// and az:// URLs",
    "plot": "needed for --plot and --report",
}


def examine_software(*, quick: bool) -> Iterator[Finding]:
    """Check what is installed. Imports torch, which takes seconds, unless `quick`."""
    yield Finding(
        "software", "python", "works", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    )
    yield _packages()
    yield _torch(quick=quick)
    yield _kernels()
    for extra, purpose in _OPTIONAL.items():
        yield _extra(extra, purpose)


def _required(extra: str | None) -> dict[str, str]:
    """Packages that ckptstore (or an extra) requires, each with its minimum version; ``""``: any."""
    found = {}
    for line in metadata.requires("ckptstore") or []:
        match = _REQUIREMENT.match(line)
        if match is not None and match[3] == extra and match[1] != "ckptstore":
            found[match[1]] = match[2] or ""
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` -> (2, 13, 0): enough to compare releases."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _wanting(extra: str | None) -> tuple[dict[str, str | None], list[str]]:
    """The versions of an extra's packages, and for people a list of those that are missing or too old."""
    found: dict[str, str | None] = {}
    wanting = []
    for package, least in _required(extra).items():
        found[package] = version = _version(package)
        if version is None:
            wanting.append(f"{package} is not installed")
        elif least and _numbers(version) < _numbers(least):
            wanting.append(f"{package} {version} is older than {least}")
    return found, wanting


def _packages() -> Finding:
    found, wanting = _wanting(None)
    values = {"ckptstore": metadata.version("ckptstore"), **found}
    if wanting:
        asked = " ".join(f"'{name}>={least}'" if least else name for name, least in _required(None).items())
        return Finding("software", "packages", "fails", "; ".join(wanting), f"pip install {asked}", values)
    told = ", ".join(f"{name} {version}" for name, version in values.items())
    return Finding("software", "packages", "works", told, None, values)


def _extra(extra: str, purpose: str) -> Finding:
    found, wanting = _wanting(extra)
    install = f"pip install 'ckptstore[{extra}]'"
    if wanting:
        verdict: Verdict = "absent"
        return Finding("software", extra, verdict, f"{'; '.join(wanting)} ({purpose})", install, found)
    return Finding(
        "software", extra, "works", ", ".join(f"{name} {version}" for name, version in found.items()), None, found
    )


def _torch(*, quick: bool) -> Finding:
    version = _version("torch")
    if version is None:
        what = "not installed: training and .pt files need it; inspecting and restoring stores do not"
        return Finding("software", "torch", "absent", what, "pip install torch, then pip install 'ckptstore[torch]'")
    least = _required("torch").get("torch", "")
    if least and _numbers(version) < _numbers(least):
        return Finding(
            "software", "torch", "fails", f"{version} is older than {least}", f"pip install 'torch>={least}'"
        )
    if quick:
        return Finding("software", "torch", "works", f"{version} (not imported)", None, {"version": version})
    from ckptstore.frameworks import bridge

    try:
        seen = bridge.torch_devices()
    except Exception as error:  # noqa: BLE001 - a broken build may raise anything, and that is the finding
        what = f"{version} does not load: {type(error).__name__}: {error}"
        return Finding("software", "torch", "fails", what.splitlines()[0], "install torch again", {"version": version})
    devices = f", {seen['devices']} x {seen['gpu']}" if seen["devices"] else ", no GPU"
    what = f"{version}, {seen['threads']} threads{devices}"
    return Finding("software", "torch", "works", what, None, {"version": version, **seen})


def _kernels() -> Finding:
    from ckptstore.formats import kernel_choice

    variable = kernel_choice.VARIABLE
    try:
        kind = kernel_choice.kind()
    except CkptError as error:
        return Finding("software", "kernels", "fails", str(error), f"unset {variable}")
    values = {"kernels": kind}
    if kind == "compiled":
        name = importlib.import_module(kernel_choice.CORE).selected()
        return Finding("software", "kernels", "works", f"compiled, for {name}", None, values | {"instructions": name})
    what = "in numpy, which encodes deltas and step diffs at about half the speed, to the same bytes"
    try:
        importlib.import_module(kernel_choice.CORE)
    except ImportError as error:
        do = "install a wheel, or install it from source where there is a C compiler (pip install -v says what fails)"
        return Finding("software", "kernels", "slow", f"{what}: {error}", do, values)
    return Finding("software", "kernels", "slow", what, f"unset {variable}", values)
