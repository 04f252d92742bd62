"""A copy of the working tree that may be changed: compiled once, and then what has changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The compiler, under the name that the checkout's build has for it, and kernels of as few devices.
_TAKEN = re.compile(
    r"^(?:CMAKE_CXX_COMPILER|FARANDOLE_CUDA_CODES|FARANDOLE_NVRTC):.*$", re.MULTILINE
)


@dataclass
class CopiedTree:
    """`root`: where it lies, in a folder of its own below build/."""

    root: Path

    @property
    def build_folder(self) -> Path:
        return self.root / "build" / sys.implementation.cache_tag

    def shell(
        self, *command: str | Path, limit: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command in the copy, over its own package; it may fail."""
        environment = os.environ | {
            "PYTHONPATH": str(self.root / "python"),
            "CCACHE_BASEDIR": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_CEILING_DIRECTORIES": str(self.root.parent),  # the copy is no part of ours
        }
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.root,
            env=environment,
            timeout=limit,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def restore(self) -> None:
        """The files that git knows or does not ignore; those that are the same keep their time."""
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        names = {name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file()}
        paths = [p for f in ("csrc", "python", "tests") for p in (self.root / f).rglob("*")]
        old = {str(p.relative_to(self.root)) for p in paths if p.is_file() and not p.is_symlink()}
        for name in old - names:
            (self.root / name).unlink()
        for name in names:
            source, target = ROOT / name, self.root / name
            if not target.exists() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def configure(self, folder: str, *options: str) -> None:
        """A build folder below the usual one ("." for that itself)."""
        # Warnings as errors, as in the Makefile: with the same options ccache knows all of it.
        cache = ROOT / "build" / str(sys.implementation.cache_tag) / "CMakeCache.txt"
        taken = _TAKEN.findall(cache.read_text()) if cache.exists() else []
        options = (*(f"-D{line}" for line in taken), *options)
        done = self.shell("cmake", "-S", self.root, "-B", self.build_folder / folder, "-G", "Ninja",
                          "-DFARANDOLE_TESTS=ON", "-DFARANDOLE_WERROR=ON", *options)  # fmt: skip
        if done.returncode != 0:
            raise SystemExit(done.stdout)

    def build(self, *targets: str, folder: str = ".") -> None:
        where = self.build_folder / folder
        done = self.shell("cmake", "--build", where, "--target", *targets)
        if done.returncode != 0:
            raise SystemExit(f"does not compile:\n{done.stdout[-4000:]}")

    def prepare(self, *targets: str) -> None:
        """Compiles what the copy has now; its package uses that, if `_core` is among it."""
        # Where the checkout has it: ccache knows bindings by the path of their headers, too.
        environment = self.root / ".venv"
        if not environment.is_symlink():
            environment.symlink_to(sys.prefix)
        python = environment / "bin" / Path(sys.executable).name
        self.configure(".", f"-DPython_EXECUTABLE={python}")
        self.build(*targets)
        if "_core" in targets:
            self._link_modules()

    def _link_modules(self) -> None:
        names = ("_core*.so", "_tf.so", "kernels-*.fatbin")
        for library in [each for name in names for each in self.build_folder.glob(name)]:
            link = self.root / "python" / "farandole" / library.name
            link.unlink(missing_ok=True)
            link.symlink_to(library)
        script = "import farandole; print(farandole.__file__)"
        where = self.shell(sys.executable, "-c", script).stdout
        if not where.startswith(str(self.root)):
            raise SystemExit(f"the tests would run {where.strip()}: an editable install goes first")
