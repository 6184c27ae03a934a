"""The extension module ``ckptstore.formats.core``. Everything else is in pyproject.toml."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

sys.path.insert(0, str(Path(__file__).resolve().parent / "native"))
import core_build


class BuildCore(build_ext):
    """Compile with one call. Without the module the installation works, with numpy's kernels."""

    def build_extension(self, ext: Extension) -> None:
        """Compile `ext`. Raises ``CompileError``, of which setuptools makes a warning."""
        target = os.environ.get("CKPTSTORE_TARGET")  # of `make wheels`
        try:
            core_build.compile_core(Path(self.get_ext_fullpath(ext.name)), target=target)
        except core_build.CannotCompileError as error:
            raise CompileError(f"the kernels will run in numpy, which is slower: {error}") from None

    def copy_extensions_to_source(self) -> None:
        """Copy what was compiled beside the sources. If that failed, no older module stays there."""
        super().copy_extensions_to_source()
        for ext in self.extensions:
            if not Path(self.build_lib, self.get_ext_filename(ext.name)).exists():
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)


sources = [path.relative_to(core_build.NATIVE.parent).as_posix() for path in sorted(core_build.NATIVE.glob("*.[ch]"))]
core = Extension(
    "ckptstore.formats.core",
    [name for name in sources if name.endswith(".c")],
    depends=[name for name in sources if name.endswith(".h")],
    py_limited_api=True,
    optional=not os.environ.get("CKPTSTORE_TARGET"),
)
abi3 = not sysconfig.get_config_var("Py_GIL_DISABLED")
setup(
    ext_modules=[core] if abi3 else [],
    cmdclass={"build_ext": BuildCore},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if abi3 else {},
)
