# The folds, compiled once for each instruction set that is worth it; the processor chooses at run
# time. Same source, same bits; see csrc/fold/instruction_sets/vectors.h.
include(CheckCXXCompilerFlag)

add_library(farandole_fold_baseline OBJECT csrc/fold/instruction_sets/baseline.cpp)
target_link_libraries(farandole_fold_baseline PUBLIC farandole_flags)
list(APPEND FARANDOLE_FOLDS farandole_fold_baseline)

# farandole_add_instruction_set(name flag…): skipped where the compiler does not know the flags.
function(farandole_add_instruction_set name)
  string(TOUPPER ${name} upper)
  string(REPLACE ";" " " CMAKE_REQUIRED_FLAGS "${ARGN}")
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY) # nothing is linked with these flags
  check_cxx_compiler_flag("" FARANDOLE_COMPILER_HAS_${upper})
  if(FARANDOLE_COMPILER_HAS_${upper})
    add_library(farandole_fold_${name} OBJECT csrc/fold/instruction_sets/${name}.cpp)
    target_link_libraries(farandole_fold_${name} PUBLIC farandole_flags)
    target_compile_options(farandole_fold_${name} PRIVATE ${ARGN})
    target_compile_definitions(farandole_engine PRIVATE FARANDOLE_HAS_${upper}=1)
    set(FARANDOLE_FOLDS ${FARANDOLE_FOLDS} farandole_fold_${name} PARENT_SCOPE)
  endif()
endfunction()

# gcc 12 takes the undefined operand of its own intrinsics for a mistake of the caller:
# https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105593
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(FARANDOLE_FALSE_ALARMS -Wno-maybe-uninitialized)
endif()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  farandole_add_instruction_set(avx2 -mavx2 -mf16c)
  set(avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq ${FARANDOLE_FALSE_ALARMS})
  farandole_add_instruction_set(avx512 ${avx512})
  farandole_add_instruction_set(avx512_bf16 ${avx512} -mavx512bf16)
endif()
