// The file that nvcc made, as it is. Its own headers name its length, but only to a driver.
#include "cuda/fatbin.h"

#if defined(__x86_64__)
#define FARANDOLE_SECTION ".section .rodata, \"a\", @progbits\n"
#else
#define FARANDOLE_SECTION ".section .rodata, \"a\", %progbits\n"
#endif

// clang-format off
asm(FARANDOLE_SECTION
    ".balign 64\n"
    ".globl farandole_fatbin\n"
    ".hidden farandole_fatbin\n"
    "farandole_fatbin:\n"
    ".incbin \"" FARANDOLE_FATBIN "\"\n"
    "farandole_fatbin_end:\n"
    ".balign 8\n"
    ".globl farandole_fatbin_bytes\n"
    ".hidden farandole_fatbin_bytes\n"
    "farandole_fatbin_bytes:\n"
    ".quad farandole_fatbin_end - farandole_fatbin\n"
    ".previous\n");
// clang-format on
