"""Builds the native ops with the package. Whatever fails, the package installs: it then runs on XLA's ops alone.

NORIA_NATIVE=0 in the environment turns the native ops off. The reason why there is no library is left where
`noria env` looks for it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = "src/noria/ops/_native"


class NativeOps(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """jaxlib brings the headers of XLA's FFI; without a compiler they are of no use."""
        return [] if self._why_not() else ["jaxlib>=0.10.0"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / _FOLDER
        library, reason = folder / "libnoria_ops.so", folder / "not_built.txt"
        folder.mkdir(parents=True, exist_ok=True)
        why_not = self._why_not() or self._build(library)
        if why_not:
            library.unlink(missing_ok=True)
            reason.write_text(why_not + "\n")
            print(f"the native ops are not built: {why_not}", file=sys.stderr)
        else:
            reason.unlink(missing_ok=True)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["artifacts"] += [f"{_FOLDER}/libnoria_ops.so", f"{_FOLDER}/not_built.txt"]

    def _why_not(self) -> str | None:
        if os.environ.get("NORIA_NATIVE", "1") == "0":
            return "NORIA_NATIVE=0 when the package was installed"
        if sys.platform == "win32":
            return "Windows is not supported"
        return None if self._builder().find_compiler() else "no C++ compiler was found"

    def _build(self, library: Path) -> str | None:
        """Why it failed, if it did."""
        try:
            import jaxlib

            self._builder().build_library(library, Path(jaxlib.__file__).parent / "include")
        except Exception as error:  # the install must go on
            return " ".join(str(error).split()) or type(error).__name__
        return None

    def _builder(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location("noria_native_build", Path(self.root) / "native" / "build.py")
        if spec is None or spec.loader is None:
            raise ImportError("native/build.py is missing")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
