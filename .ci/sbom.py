"""Whether a wheel's bill of materials is true: .ci/sbom.py WHEEL

The bill (csrc/sbom.cmake writes it) is compared with what the libraries of the wheel show: the
compiler that each names, the C++ library, pybind11, kernels for devices; with the wheel's name and
version; and with the notices. Prints the components, or each difference.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KERNELS = {"NVRTC": {"nvidia-cuda-cccl-cu12"}, "nvcc": set[str]()}  # compilers, and their headers
LIBCXX = {"libc++", "libc++abi", "libunwind", "compiler_rt"}  # that zig links in
COMPILERS = {"GNU": r"GCC: \(.+\) ", "Clang": "clang version "}  # as .comment spells them
UNSEEN = {"libstdc++_nonshared"}  # nothing in a library tells it from the system's


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Library:
    name: str
    image: bytes
    needed: str  # readelf's list of the libraries that it needs
    compilers: str  # what compilers have left in .comment

    @classmethod
    def read(cls, path: Path) -> Library:
        return cls(
            path.name,
            path.read_bytes(),
            "\n".join(re.findall(r"\(NEEDED\).*", said("readelf", "--dynamic", str(path)))),
            " ".join(said("readelf", "--string-dump=.comment", str(path)).split()),
        )

    def contains(self) -> set[str]:
        """The components whose traces are in it. Names of types tell the C++ library."""
        found = {"pybind11"} if b"pybind11" in self.image else set()
        if b"NSt3__1" in self.image and "[libc++.so" not in self.needed:
            return found | LIBCXX
        if b"NSt3__1" not in self.image and "[libstdc++.so" not in self.needed:
            return found | {"libstdc++"}
        return found


def differences(folder: Path) -> Iterator[str]:
    libraries = [Library.read(path) for path in sorted(folder.rglob("*.so*"))]
    (about,) = folder.glob("farandole-*.dist-info")
    bill = json.loads((about / "sboms" / "farandole.cdx.json").read_text())
    listed = {part["name"]: part["licenses"][0]["expression"] for part in bill["components"]}
    tools = {tool["name"]: tool["version"] for tool in bill["metadata"]["tools"]["components"]}

    contained = set[str]().union(*(library.contains() for library in libraries))
    if any(folder.rglob("*.fatbin")):
        by = [name for name in KERNELS if name in tools]
        contained |= KERNELS[by[0]] if by else {"a compiler of kernels"}
    yield from (f"{name} is in the wheel, not in its bill" for name in contained - set(listed))
    yield from (f"{name} is in the bill only" for name in set(listed) - contained - UNSEEN)
    for library in libraries:
        if not any(_made(library, *tool) for tool in tools.items()):
            yield f"{library.name} is by none of {tools}: {library.compilers}"
    version = bill["metadata"]["component"]["version"]
    if f"\nVersion: {version}\n" not in (about / "METADATA").read_text():
        yield f"the bill is of {version}, and the wheel is not"
    # A license with an exception asks for no notice in what compilers make.
    notices = {path.name for path in (about / "licenses").iterdir() if path.is_dir()}
    yield from (f"{name} has a notice and is not in the bill" for name in notices - set(listed))
    missing = {name for name, license in listed.items() if " WITH " not in license} - notices
    yield from (f"there is no notice of {name}" for name in missing)


def _made(library: Library, compiler: str, version: str) -> bool:
    if compiler not in COMPILERS:
        return False
    return re.search(COMPILERS[compiler] + re.escape(version), library.compilers) is not None


def main(wheel: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        found = sorted(differences(Path(folder)))
    print("\n".join(found) or f"{Path(wheel).name}: its bill of materials is true")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
