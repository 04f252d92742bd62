# What compiles kernels for devices: `compiler`, a command that takes nvcc's options, empty where there
# is none; and whether it is nvrtc.py, FARANDOLE_BY_NVRTC.
#
# NVRTC of CUDA 12 comes first: what it makes runs with more drivers and on more devices than what
# nvcc 13 makes, and of nvcc 12 PyPI has no package. Then nvcc: one in PATH, or the package
# nvidia-cuda-nvcc (with nvidia-cuda-crt, nvidia-nvvm and nvidia-cuda-runtime) of the Python that
# builds. Of the runtime it includes headers by itself; nothing of it is linked.
set(FARANDOLE_NVRTC "$ENV{NVRTC_PACKAGES}" CACHE STRING
    "A folder with the packages of csrc/cuda/nvrtc.py; empty: those of the Python that builds; off: none")
set(FARANDOLE_NVCC "" CACHE STRING
    "The nvcc that compiles kernels where NVRTC does not; empty: look for one; off: none")
set(FARANDOLE_NVRTC_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/nvrtc.py)

set(compiler "")
if(FARANDOLE_NVRTC STREQUAL "" AND FARANDOLE_NVCC STREQUAL "" AND Python_EXECUTABLE)
  set(compiler ${Python_EXECUTABLE} ${FARANDOLE_NVRTC_SCRIPT})
elseif(FARANDOLE_NVRTC AND NOT FARANDOLE_NVRTC STREQUAL "off")
  set(compiler ${Python_EXECUTABLE})
  if(NOT compiler)  # without the module
    set(compiler python3)
  endif()
  list(APPEND compiler ${FARANDOLE_NVRTC_SCRIPT} --packages ${FARANDOLE_NVRTC})
endif()
set(FARANDOLE_BY_NVRTC OFF)
if(compiler)
  execute_process(COMMAND ${compiler} --version OUTPUT_QUIET
                  ERROR_VARIABLE why_not RESULT_VARIABLE failed)
  if(NOT failed)
    set(FARANDOLE_BY_NVRTC ON)
  elseif(FARANDOLE_NVRTC)
    message(FATAL_ERROR "FARANDOLE_NVRTC: ${failed}: ${why_not}")
  else()
    set(compiler "")
  endif()
endif()

if(NOT compiler AND NOT FARANDOLE_NVCC STREQUAL "off")
  set(compiler "${FARANDOLE_NVCC}")
  if(NOT compiler)
    find_program(FARANDOLE_NVCC_IN_PATH nvcc)
    if(FARANDOLE_NVCC_IN_PATH)
      set(compiler "${FARANDOLE_NVCC_IN_PATH}")
    endif()
  endif()
  if(NOT compiler AND Python_EXECUTABLE)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import nvidia, pathlib
for folder in nvidia.__path__:
  for nvcc in sorted(pathlib.Path(folder).glob('*/bin/nvcc')):
    print(nvcc, end=';')" OUTPUT_VARIABLE in_packages ERROR_QUIET)
    if(in_packages)
      list(GET in_packages 0 compiler)
    endif()
  endif()
endif()
