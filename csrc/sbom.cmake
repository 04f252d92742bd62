# The bill of materials of a wheel, where PEP 770 wants it: what was compiled or linked into it beside
# our own source, and by which compilers. The notices that others' licenses ask for lie beside it.
# .ci/sbom.py compares both with the libraries of the wheel.
set(sbom ${CMAKE_CURRENT_BINARY_DIR}/sbom)
set(sbom_components "")
set(sbom_names "")
set(sbom_tools "{ \"type\": \"application\", \"name\": \"${CMAKE_CXX_COMPILER_ID}\", \"version\": \"${CMAKE_CXX_COMPILER_VERSION}\" }")

# farandole_contains(name version license [field]): one more component.
function(farandole_contains name version license)
  set(fields "\"bom-ref\": \"${name}\"" "\"name\": \"${name}\"" "\"version\": \"${version}\"" ${ARGN}
             "\"licenses\": [{ \"expression\": \"${license}\" }]")
  list(JOIN fields ", " fields)
  set(sbom_components ${sbom_components} "{ \"type\": \"library\", ${fields} }" PARENT_SCOPE)
  set(sbom_names ${sbom_names} "\"${name}\"" PARENT_SCOPE)
endfunction()

farandole_contains(pybind11 ${pybind11_VERSION} BSD-3-Clause "\"purl\": \"pkg:pypi/pybind11@${pybind11_VERSION}\"")
execute_process(COMMAND ${Python_EXECUTABLE} -c "from importlib.metadata import files
print(next(f.locate() for f in files('pybind11') if f.name == 'LICENSE'))"
                OUTPUT_VARIABLE notice OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
install(FILES ${notice} DESTINATION ${SKBUILD_METADATA_DIR}/licenses/pybind11)

# The C++ library, if it is in what the linker makes: a program says which one it is.
file(WRITE ${sbom}/probe.cpp [[
#include <stdexcept>
#include <string>
#define TEXT(x) #x
#define VALUE(x) TEXT(x)
#ifdef _LIBCPP_VERSION
const char* const library = "C++ library: libc++ " VALUE(_LIBCPP_VERSION);
#else
const char* const library = "C++ library: libstdc++ " VALUE(_GLIBCXX_RELEASE);
#endif
int main(int count, char** words) { throw std::runtime_error(library + std::string(words[count - 1])); }
]])
try_compile(linked ${sbom} ${sbom}/probe.cpp OUTPUT_VARIABLE why_not COPY_FILE ${sbom}/probe)
if(NOT linked)
  message(FATAL_ERROR "The program that says which C++ library is linked is not built:\n${why_not}")
endif()
file(STRINGS ${sbom}/probe shared REGEX "^lib(std)?c\\+\\+\\.so")
file(STRINGS ${sbom}/probe library REGEX "^C\\+\\+ library: ")
string(REGEX MATCH "(lib[a-z+]+) ([0-9]+)" library "${library}")
set(libstdcxx_license "GPL-3.0-or-later WITH GCC-exception-3.1")
if(NOT shared AND CMAKE_MATCH_1 STREQUAL "libc++")
  math(EXPR major "${CMAKE_MATCH_2} / 10000")
  math(EXPR minor "${CMAKE_MATCH_2} / 100 % 100")
  math(EXPR patch "${CMAKE_MATCH_2} % 100")
  foreach(part libc++ libc++abi libunwind)
    string(REPLACE "+" "x" folder ${part})
    farandole_contains(${part} ${major}.${minor}.${patch} "Apache-2.0 WITH LLVM-exception")
    if(FARANDOLE_ZIG)
      install(FILES ${FARANDOLE_ZIG}/lib/${folder}/LICENSE.TXT
              DESTINATION ${SKBUILD_METADATA_DIR}/licenses/${part})
    endif()
  endforeach()
  if(FARANDOLE_ZIG)  # it has __cpu_model
    execute_process(COMMAND ${FARANDOLE_ZIG}/zig version
                    OUTPUT_VARIABLE zig OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    farandole_contains(compiler_rt ${zig} MIT "\"purl\": \"pkg:pypi/ziglang@${zig}\"")
    install(FILES ${FARANDOLE_ZIG}/LICENSE DESTINATION ${SKBUILD_METADATA_DIR}/licenses/compiler_rt)
  endif()
elseif(NOT shared)
  farandole_contains(libstdc++ ${CMAKE_MATCH_2} ${libstdcxx_license})
else()
  # Compilers of manylinux' images add this to the system's library, which is older.
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++_nonshared.a
                  OUTPUT_VARIABLE added OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(IS_ABSOLUTE "${added}" AND CMAKE_MATCH_1 STREQUAL "libstdc++")
    farandole_contains(libstdc++_nonshared ${CMAKE_MATCH_2} ${libstdcxx_license})
  endif()
endif()

# The headers that kernels include, as their compiler says (fatbin.cmake's made_of).
if(FARANDOLE_HAS_KERNELS)
  set(by nvcc)
  if(FARANDOLE_BY_NVRTC)
    set(by NVRTC)
    string(REGEX MATCH "nvidia_cuda_cccl_cu12-([0-9.]+)\\.dist-info" found "${made_of}")
    farandole_contains(nvidia-cuda-cccl-cu12 ${CMAKE_MATCH_1} "Apache-2.0 WITH LLVM-exception"
                       "\"purl\": \"pkg:pypi/nvidia-cuda-cccl-cu12@${CMAKE_MATCH_1}\"")
  endif()
  math(EXPR major "${FARANDOLE_NVCC_VERSION} / 1000")
  math(EXPR minor "${FARANDOLE_NVCC_VERSION} % 1000 / 10")
  string(APPEND sbom_tools ",\n      { \"type\": \"application\", \"name\": \"${by}\", \"version\": \"${major}.${minor}\" }")
endif()

list(JOIN sbom_components ",\n    " sbom_components)
list(JOIN sbom_names ", " sbom_names)
configure_file(csrc/sbom.cdx.json.in farandole.cdx.json @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/farandole.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms)
