"""Whether the libraries of a wheel are built to be hard to attack: .ci/hardened.py WHEEL

Each binds all its symbols when it is loaded, and is read-only from then on (relro, BIND_NOW);
guards its stacks (-fstack-protector-strong); has the C library check what it copies (FORTIFY); and
marks where it may be jumped to (CET), on x86. Of FORTIFY one library is to show something: a small
one may copy nothing whose size is known. Prints one line for each library, and what it lacks.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def is_fortified(library: Path) -> bool:
    symbols = said("readelf", "--dyn-syms", "--wide", str(library))
    return "_chk@" in symbols.replace("__stack_chk", "")


def lacks(library: Path, *, fortified: bool) -> list[str]:
    dynamic = said("readelf", "--dynamic", "--wide", str(library))
    segments = said("readelf", "--segments", "--wide", str(library))
    symbols = said("readelf", "--dyn-syms", "--wide", str(library))
    found = {
        "BIND_NOW": "BIND_NOW" in dynamic or "Flags: NOW" in dynamic,
        "GNU_RELRO": "GNU_RELRO" in segments,
        "stack protector": "__stack_chk_fail" in symbols,
        "FORTIFY": fortified,
    }
    if platform.machine() == "x86_64":
        # The note is there only if all files that were linked have it, the compiler's own, too.
        notes = said("readelf", "--notes", "--wide", str(library))
        code = said("objdump", "--disassemble", "--no-show-raw-insn", str(library))
        found["CET"] = "IBT" in notes or code.count("endbr64") > code.count("\tret") / 4
        found["stack protector"] |= "%fs:0x28" in code  # zig links what it calls then
    return [name for name, there in found.items() if not there]


def main(wheel: str) -> int:
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        libraries = sorted(Path(folder).glob("farandole/*.so"))
        fortified = any(map(is_fortified, libraries))
        for library in libraries:
            missing = lacks(library, fortified=fortified)
            failed |= bool(missing)
            print(f"{library.name}: {'lacks ' + ', '.join(missing) if missing else 'hardened'}")
    if not libraries:
        sys.exit(f"{wheel} has no libraries")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
