#include "transport/foreign_memory.h"

#include <sys/uio.h>

#include <cerrno>

namespace farandole {
namespace {

using Call = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long,
                         unsigned long);

/// The kernel copies page by page, and stops early at the first page it cannot reach.
int copy_all(Call call, pid_t process, std::byte* here, uint64_t there, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const iovec local{here + done, bytes - done};
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address of the other process
    const iovec remote{reinterpret_cast<void*>(there + done), bytes - done};
    const ssize_t copied = call(process, &local, 1, &remote, 1, 0);
    if (copied > 0)
      done += static_cast<size_t>(copied);
    else if (copied == 0)
      return EFAULT;
    else if (errno != EINTR)
      return errno;
  }
  return 0;
}

}  // namespace

int read_foreign(pid_t process, std::byte* to, uint64_t from, size_t bytes) {
  return copy_all(::process_vm_readv, process, to, from, bytes);
}

int write_foreign(pid_t process, uint64_t to, const std::byte* from, size_t bytes) {
  return copy_all(::process_vm_writev, process, const_cast<std::byte*>(from), to, bytes);
}

}  // namespace farandole
