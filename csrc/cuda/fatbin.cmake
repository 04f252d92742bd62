# The kernels for devices, where there is a compiler for them (kernel_compiler.cmake).
#
# Targets, only with one: farandole_kernels, the file FARANDOLE_KERNELS, which is installed beside the
# module, and farandole_cuda_ptx, the text that tests/cuda/check_ptx.py reads.
include(csrc/cuda/kernel_compiler.cmake)

# Code of an architecture runs on all of its generation: that of sm_80 on sm_86 and sm_89, too.
set(FARANDOLE_CUDA_CODES "sm_70;sm_75;sm_80;sm_90;sm_100;sm_120" CACHE STRING
    "What kernels are compiled for, oldest first, as far as the compiler knows it")
set(FARANDOLE_FATBIN_CACHE "$ENV{FATBIN_CACHE}" CACHE PATH
    "A folder of compiled kernels for several builds, by a hash of all they come from; empty: none")

# In `into`: the file, and all that it includes of csrc, wherever that is included.
function(farandole_included_by file into)
  set(found "")
  set(rest ${file})
  while(rest)
    list(POP_FRONT rest next)
    list(APPEND found ${next})
    file(STRINGS ${next} lines REGEX "^#include \"")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "^#include \"(.*)\".*" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/\\1" header ${line})
      if(EXISTS ${header} AND NOT header IN_LIST found AND NOT header IN_LIST rest)
        list(APPEND rest ${header})
      endif()
    endforeach()
  endwhile()
  set(${into} ${found} PARENT_SCOPE)
endfunction()

set(FARANDOLE_HAS_KERNELS OFF)
if(compiler)
  execute_process(COMMAND ${compiler} --list-gpu-code OUTPUT_VARIABLE known RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${compiler} --list-gpu-code fails: set FARANDOLE_NVCC to another nvcc")
  endif()
  string(REGEX MATCHALL "sm_[0-9]+" known "${known}")
endif()
if(compiler)
  set(FARANDOLE_HAS_KERNELS ON)
  # One PTX for all, of the oldest architecture: the kernels use nothing newer. Each architecture
  # that the compiler knows gets code of its own; a driver compiles the PTX for those that came later.
  set(codes "")
  foreach(code IN LISTS FARANDOLE_CUDA_CODES)
    if(code IN_LIST known)
      list(APPEND codes ${code})
    endif()
  endforeach()
  if(NOT codes)
    message(FATAL_ERROR "${compiler} knows none of FARANDOLE_CUDA_CODES, ${FARANDOLE_CUDA_CODES}")
  endif()
  list(GET codes 0 first)
  list(JOIN codes "," code_list)
  list(JOIN compiler " " by)
  message(STATUS "Kernels for ${code_list} and PTX for ${first}, by ${by}")

  # The arithmetic of docs/determinism.md: no contraction, subnormals, divisions that are rounded.
  set(flags -std=c++20 -fmad=false -ftz=false -prec-div=true -I${CMAKE_CURRENT_SOURCE_DIR}/csrc)
  set(container "")
  if(NOT FARANDOLE_BY_NVRTC)
    # nvcc preprocesses by a compiler for the host, and none of its code is kept: so g++ is as good
    # as the compiler of the rest, which nvcc may not know.
    find_program(FARANDOLE_NVCC_HOST_COMPILER NAMES g++ clang++ c++)
    list(APPEND flags --expt-relaxed-constexpr -allow-unsupported-compiler
                      -ccbin ${FARANDOLE_NVCC_HOST_COMPILER})
    set(container -Xfatbin -compress-all --threads 0)
  endif()
  execute_process(COMMAND ${compiler} --version OUTPUT_VARIABLE made_of)
  if(NOT made_of MATCHES "release ([0-9]+)[.]([0-9]+)")
    message(FATAL_ERROR "${compiler} --version does not say its release: set FARANDOLE_NVCC to another nvcc")
  endif()
  math(EXPR FARANDOLE_NVCC_VERSION "1000 * ${CMAKE_MATCH_1} + 10 * ${CMAKE_MATCH_2}")
  if(FARANDOLE_BY_NVRTC)
    file(SHA256 ${FARANDOLE_NVRTC_SCRIPT} hash)
    string(APPEND made_of ${hash})
  endif()
  # What a driver has to be for them: exchange/kernel_image.h.
  string(REPLACE sm_ "" FARANDOLE_KERNEL_CODES "${code_list}")

  # By way of PTX of the oldest architecture, and with that.
  string(REPLACE sm_ compute_ oldest ${first})
  set(kernels ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/kernels/kernels.cu)
  farandole_included_by(${kernels} kernel_sources)
  # What they include may change with any of them.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${kernel_sources})
  if(FARANDOLE_BY_NVRTC)
    list(APPEND kernel_sources ${FARANDOLE_NVRTC_SCRIPT})
  endif()

  set(ptx ${CMAKE_CURRENT_BINARY_DIR}/farandole_cuda.ptx)
  add_custom_command(OUTPUT ${ptx} COMMAND ${compiler} ${flags} -ptx -arch=${oldest} ${kernels} -o ${ptx}
                     DEPENDS ${kernel_sources} VERBATIM COMMENT "Kernels to PTX")
  add_custom_target(farandole_cuda_ptx DEPENDS ${ptx})

  # Named by what they come from: a module never loads those of another one, whose parameters differ.
  set(sources_hash "${FARANDOLE_NVCC_VERSION} ${code_list}")
  foreach(part IN LISTS kernel_sources)
    file(SHA256 ${part} hash)
    string(APPEND sources_hash ${hash})
  endforeach()
  string(SHA256 sources_hash "${sources_hash}")
  string(SUBSTRING ${sources_hash} 0 12 short_hash)
  set(FARANDOLE_KERNELS kernels-${short_hash}.fatbin)
  set(fatbin ${CMAKE_CURRENT_BINARY_DIR}/${FARANDOLE_KERNELS})
  set(compile ${compiler} ${flags} -fatbin ${container}
              -gencode "arch=${oldest},code=[${code_list},${oldest}]" ${kernels} -o)
  if(FARANDOLE_FATBIN_CACHE)
    # At most as many compilations as there are versions of the kernels: it takes minutes.
    string(SHA256 key "${made_of} ${flags} ${sources_hash}")
    set(kept ${FARANDOLE_FATBIN_CACHE}/${key}.fatbin)
    add_custom_command(OUTPUT ${fatbin}
                       COMMAND sh -c "test -f '${kept}' || { mkdir -p '${FARANDOLE_FATBIN_CACHE}' && \"$@\" '${kept}.new' && mv '${kept}.new' '${kept}'; }" -- ${compile}
                       COMMAND ${CMAKE_COMMAND} -E copy ${kept} ${fatbin}
                       DEPENDS ${kernel_sources} VERBATIM COMMENT "Kernels for ${code_list}")
  else()
    add_custom_command(OUTPUT ${fatbin} COMMAND ${compile} ${fatbin}
                       DEPENDS ${kernel_sources} VERBATIM COMMENT "Kernels for ${code_list}")
  endif()
  add_custom_target(farandole_kernels DEPENDS ${fatbin})
  set_source_files_properties(csrc/cuda/exchange/kernel_image.cpp PROPERTIES COMPILE_DEFINITIONS
      "FARANDOLE_NVCC=${FARANDOLE_NVCC_VERSION};FARANDOLE_KERNEL_CODES=${FARANDOLE_KERNEL_CODES};FARANDOLE_KERNELS=\"${FARANDOLE_KERNELS}\"")
endif()
