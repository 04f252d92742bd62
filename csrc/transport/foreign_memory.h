// The memory of another process of this user, by address: one copy, and nothing is mapped.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace farandole {

/// Both return 0 when all bytes have been copied, else the errno that stopped them, some bytes
/// perhaps copied: ESRCH when the process has ended, EFAULT when it has no such memory (or none
/// that may be written), EPERM or ENOSYS when the kernel does not let us.
int read_foreign(pid_t process, std::byte* to, uint64_t from, size_t bytes);
int write_foreign(pid_t process, uint64_t to, const std::byte* from, size_t bytes);

}  // namespace farandole
