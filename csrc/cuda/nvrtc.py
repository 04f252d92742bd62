"""nvcc's part for CUDA 12, of which PyPI has no nvcc: NVRTC makes PTX of a .cu file, ptxas code of
it for each architecture, nvFatbin one image of all. Takes what fatbin.cmake says to nvcc:

    nvrtc.py --version
    nvrtc.py --list-gpu-code
    nvrtc.py -std=c++20 -Icsrc -ptx -arch=compute_70 kernels.cu -o kernels.ptx
    nvrtc.py -std=c++20 -Icsrc -fatbin -gencode arch=compute_70,code=[sm_70,sm_80,compute_70] …

The packages are those of the Python that runs this, or of --packages, a folder that
`pip install --target` filled (pyproject.toml: the group kernels).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NEEDED = {
    "nvidia-cuda-nvrtc-cu12": "cuda_nvrtc/lib/libnvrtc.so.12",
    "nvidia-cuda-nvcc-cu12": "cuda_nvcc/bin/ptxas",
    "nvidia-nvfatbin-cu12": "nvfatbin/lib/libnvfatbin.so.12",
    "nvidia-cuda-cccl-cu12": "cuda_cccl/include/cuda/std/version",
}
# NVRTC has no standard library; that of CCCL has these, under another name.
STANDARD = ("bit", "cstddef", "cstdint", "limits", "type_traits")
WRAPPED = "#include <cuda/std/{}>\nnamespace std {{ using namespace cuda::std; }}\n"
# nvcc's --expt-relaxed-constexpr: kernels call what is constexpr.
ALWAYS = ["--device-as-default-execution-space"]
# LZ4: drivers before 550 know no other compression.
CONTAINER = ["-64", "-host=linux", "-compress-all", "-compress-mode=speed"]


def find(packages: str | None) -> Path:
    """The folder `nvidia` that has all that is needed."""
    if packages:
        folders = [Path(packages) / "nvidia"]
    else:
        folders = [folder for at in sys.path if (folder := Path(at) / "nvidia").is_dir()]
    for folder in folders:
        if all((folder / path).exists() for path in NEEDED.values()):
            return folder
    names = " ".join(NEEDED)
    sys.exit(f"{packages or sys.executable} has not all of these: pip install --no-deps {names}")


def strings(values: list[bytes]) -> Any:
    return (ctypes.c_char_p * len(values))(*values)


class Library:
    """A library of NVIDIA's, whose calls return 0 on success."""

    def __init__(self, path: Path, prefix: str) -> None:
        self._calls, self._prefix = ctypes.CDLL(str(path)), prefix

    def code(self, call: str, *values: Any) -> int:
        return int(getattr(self._calls, self._prefix + call)(*values))

    def __call__(self, call: str, *values: Any) -> None:
        if code := self.code(call, *values):
            text = getattr(self._calls, self._prefix + "GetErrorString")
            text.restype = ctypes.c_char_p
            sys.exit(f"{self._prefix}{call} fails: {text(code).decode()}")

    def bytes_of(self, size: str, get: str, handle: Any) -> bytes:
        count = ctypes.c_size_t()
        self(size, handle, ctypes.byref(count))
        made = ctypes.create_string_buffer(count.value)
        self(get, handle, made)
        return made.raw


class Compiler:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ptxas = folder / NEEDED["nvidia-cuda-nvcc-cu12"]
        self.nvrtc = Library(folder / NEEDED["nvidia-cuda-nvrtc-cu12"], "nvrtc")
        self.nvfatbin = Library(folder / NEEDED["nvidia-nvfatbin-cu12"], "nvFatbin")

    def version(self) -> str:
        """As nvcc says it; and all that it depends on."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.nvrtc("Version", ctypes.byref(major), ctypes.byref(minor))
        release = f"release {major.value}.{minor.value},"
        command = [str(self.ptxas), "--version"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        if release not in said:
            sys.exit(f"NVRTC is of {release[:-1]}, and ptxas of another one: {said}")
        kept = sorted(path.name for path in self.folder.parent.glob("nvidia_*_cu12-*.dist-info"))
        return "\n".join([f"NVRTC, {release} with", said.strip(), *kept])

    def architectures(self) -> list[int]:
        count = ctypes.c_int()
        self.nvrtc("GetNumSupportedArchs", ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self.nvrtc("GetSupportedArchs", known)
        return list(known)

    def ptx(self, source: Path, virtual: str, flags: list[str]) -> bytes:
        """Ends with a zero."""
        program = ctypes.c_void_p()
        texts = strings([WRAPPED.format(name).encode() for name in STANDARD])
        names = strings([name.encode() for name in STANDARD])
        text, name = source.read_bytes(), str(source).encode()
        into = ctypes.byref(program)
        self.nvrtc("CreateProgram", into, text, name, len(STANDARD), texts, names)
        headers = self.folder / "cuda_cccl" / "include"
        options = [*ALWAYS, *flags, f"-I{headers}", f"-arch={virtual}"]
        given = strings([option.encode() for option in options])
        failed = self.nvrtc.code("CompileProgram", program, len(options), given)
        log = self.nvrtc.bytes_of("GetProgramLogSize", "GetProgramLog", program)
        if said := log.rstrip(b"\0\n").decode():
            print(said, file=sys.stderr)
        if failed:
            sys.exit(f"NVRTC does not compile {source}: code {failed}")
        return self.nvrtc.bytes_of("GetPTXSize", "GetPTX", program)

    def cubin(self, ptx: Path, real: str, flags: list[str]) -> bytes:
        made = ptx.with_name(real)
        command = [str(self.ptxas), f"-arch={real}", *flags, str(ptx), "-o", str(made)]
        ran = subprocess.run(command, check=False, capture_output=True, text=True)
        if ran.returncode:
            sys.exit(f"ptxas makes no code for {real}:\n{ran.stdout}{ran.stderr}")
        return made.read_bytes()

    def fatbin(self, ptx: bytes, codes: list[str], name: bytes, flags: list[str]) -> bytes:
        """Makes a fatbin. A virtual architecture, like compute_70, gets the PTX itself."""
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
            file = Path(folder) / "kernels.ptx"
            file.write_bytes(ptx.rstrip(b"\0"))
            real = [code for code in codes if code.startswith("sm_")]
            made = pool.map(lambda code: self.cubin(file, code, flags), real)
            cubins = dict(zip(real, made, strict=True))
        handle = ctypes.c_void_p()
        options = strings([option.encode() for option in CONTAINER])
        self.nvfatbin("Create", ctypes.byref(handle), options, len(CONTAINER))
        for code in codes:
            number = code.split("_")[1].encode()
            if cubin := cubins.get(code):
                size = ctypes.c_size_t(len(cubin))
                self.nvfatbin("AddCubin", handle, cubin, size, number, name)
            else:
                size = ctypes.c_size_t(len(ptx))
                self.nvfatbin("AddPTX", handle, ptx, size, number, name, " ".join(flags).encode())
        return self.nvfatbin.bytes_of("Size", "Get", handle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--packages")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--list-gpu-code", action="store_true")
    parser.add_argument("-ptx", action="store_true")
    parser.add_argument("-fatbin", action="store_true")
    parser.add_argument("-arch")
    parser.add_argument("-gencode")
    parser.add_argument("-o", type=Path)
    parser.add_argument("source", type=Path, nargs="?")
    asked, flags = parser.parse_known_args()  # the others are NVRTC's
    compiler = Compiler(find(asked.packages))
    if asked.version:
        print(compiler.version())
    elif asked.list_gpu_code:
        print(*(f"sm_{known}" for known in compiler.architectures()), sep="\n")
    elif asked.ptx:
        asked.o.write_bytes(compiler.ptx(asked.source, asked.arch, flags).rstrip(b"\0"))
    elif asked.fatbin and (wanted := re.fullmatch(r"arch=(\w+),code=\[(.+)\]", asked.gencode)):
        ptx, codes = compiler.ptx(asked.source, wanted[1], flags), wanted[2].split(",")
        name = asked.source.stem.encode()
        # ptxas and drivers contract, too, and nvcc tells them this.
        again = ["--fmad", "false"] if "-fmad=false" in flags else []
        asked.o.write_bytes(compiler.fatbin(ptx, codes, name, again))
    else:
        parser.error("nothing to do")


if __name__ == "__main__":
    main()
