"""Our declarations of XLA's foreign function interface against an installed jaxlib's headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from farandole._core import jax as native

jax = pytest.importorskip("jax", reason="JAX is not installed")

# Members by struct, in the order of native.layouts().
MEMBERS = {
    "XLA_FFI_Extension_Base": "type next",
    "XLA_FFI_Api_Version": "extension_start major_version minor_version",
    "XLA_FFI_Metadata": "api_version traits",
    "XLA_FFI_Metadata_Extension": "metadata",
    "XLA_FFI_Buffer": "dtype data rank dims",
    "XLA_FFI_ByteSpan": "ptr len",
    "XLA_FFI_Scalar": "dtype value",
    "XLA_FFI_Args": "size types args",
    "XLA_FFI_Rets": "size types rets",
    "XLA_FFI_Attrs": "size types names attrs",
    "XLA_FFI_CallFrame": "api ctx stage args rets attrs future",
    "XLA_FFI_Error_Create_Args": "message errc",
    "XLA_FFI_Error_Destroy_Args": "error",
    "XLA_FFI_Stream_Get_Args": "ctx stream",
    "XLA_FFI_Future_Create_Args": "future",
    "XLA_FFI_Future_SetAvailable_Args": "future",
    "XLA_FFI_Future_SetError_Args": "future error",
    "XLA_FFI_Api": (
        "api_version XLA_FFI_Error_Create XLA_FFI_Error_Destroy XLA_FFI_Stream_Get "
        "XLA_FFI_Future_Create XLA_FFI_Future_SetAvailable XLA_FFI_Future_SetError"
    ),
}
# Numbers that csrc/jax has of XLA.
NUMBERS = {
    "XLA_FFI_Extension_Metadata": 1,
    "XLA_FFI_ArgType_BUFFER": 1,
    "XLA_FFI_RetType_BUFFER": 1,
    "XLA_FFI_AttrType_SCALAR": 3,
    "XLA_FFI_AttrType_STRING": 4,
    "XLA_FFI_ExecutionStage_EXECUTE": 3,
    "XLA_FFI_Error_Code_INVALID_ARGUMENT": 3,
    "XLA_FFI_Error_Code_DEADLINE_EXCEEDED": 4,
    "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED": 8,
    "XLA_FFI_Error_Code_FAILED_PRECONDITION": 9,
    "XLA_FFI_Error_Code_ABORTED": 10,
    "XLA_FFI_Error_Code_INTERNAL": 13,
    "XLA_FFI_Error_Code_UNAVAILABLE": 14,
    "XLA_FFI_DataType_PRED": 1,
    "XLA_FFI_DataType_S8": 2,
    "XLA_FFI_DataType_S16": 3,
    "XLA_FFI_DataType_S32": 4,
    "XLA_FFI_DataType_S64": 5,
    "XLA_FFI_DataType_U8": 6,
    "XLA_FFI_DataType_U16": 7,
    "XLA_FFI_DataType_U32": 8,
    "XLA_FFI_DataType_U64": 9,
    "XLA_FFI_DataType_F16": 10,
    "XLA_FFI_DataType_F32": 11,
    "XLA_FFI_DataType_F64": 12,
    "XLA_FFI_DataType_BF16": 16,
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The values in the headers: sizes and offsets by struct, numbers by name."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    header = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    if compiler is None or not header.exists():
        pytest.skip("no C compiler, or a jaxlib without headers")
    lines = []
    for struct, members in MEMBERS.items():
        typedef = f"struct {struct}"
        lines.append(f'printf("{struct} %zu", sizeof({typedef}));')
        lines += [f'printf(" %zu", offsetof({typedef}, {m}));' for m in members.split()]
        lines.append('printf("\\n");')
    lines += [f'printf("{name} %d\\n", (int){name});' for name in NUMBERS]
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "layouts.c"
    # In C the typedefs that the header uses before their structs have to be there.
    early = ("XLA_FFI_Api_Version", "XLA_FFI_Metadata")
    typedefs = "\n".join(f"typedef struct {name} {name};" for name in early)
    # Since jaxlib 0.11.1 it has another name.
    renamed = "#define XLA_FFI_Extension_Base XLA_FFI_InternalExtension"
    source.write_text(
        f'#include <stdio.h>\n{typedefs}\n#include "xla/ffi/api/c_api.h"\n'
        f"#if XLA_FFI_API_MINOR >= 4\n{renamed}\n#endif\n"
        f"int main(void) {{ {' '.join(lines)} return 0; }}\n"
    )
    program = folder / "layouts"
    done = subprocess.run(
        [compiler, "-w", "-I", jax.ffi.include_dir(), str(source), "-o", str(program)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in printed.splitlines()]
    return {name: [int(n) for n in numbers] for name, *numbers in rows}


@pytest.mark.parametrize("struct", MEMBERS)
def test_structs_lie_as_xla_s_do(struct: str, theirs: dict[str, list[int]]) -> None:
    size, offsets = native.layouts()[struct]
    their_size, *their_offsets = theirs[struct]
    assert list(offsets) == their_offsets
    if size:  # else theirs may have grown
        assert size == their_size


def test_every_struct_is_compared() -> None:
    assert native.layouts().keys() == MEMBERS.keys()


def test_numbers_are_xla_s(theirs: dict[str, list[int]]) -> None:
    assert {name: theirs[name][0] for name in NUMBERS} == NUMBERS
