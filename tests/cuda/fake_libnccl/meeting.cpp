// How ranks of the fake NCCL reach each other.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>

#include "fake_nccl.h"

namespace farandole::cuda::fake_nccl {
namespace {

struct Id {
  int process, descriptor;
};

}  // namespace

NcclUniqueId make_id() {
  const Id mine{::getpid(), ::memfd_create("fake-nccl", MFD_CLOEXEC)};
  NcclUniqueId id{};
  if (mine.descriptor < 0 || ::ftruncate(mine.descriptor, sizeof(Table)) != 0) return id;
  std::memcpy(id.bytes, &mine, sizeof mine);
  return id;
}

/// Null if the process that has made the id is gone, or none has.
Table* table_of(const NcclUniqueId& id) {
  Id made{};
  std::memcpy(&made, id.bytes, sizeof made);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", made.process, made.descriptor);
  const int descriptor = ::open(path, O_RDWR | O_CLOEXEC);
  if (descriptor < 0) return nullptr;
  void* const mapped =
      ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  ::close(descriptor);
  return mapped == MAP_FAILED ? nullptr : static_cast<Table*>(mapped);
}

void nap(Communicator& all) {
  if (all.aborted.load(std::memory_order_acquire)) throw Aborted{};
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  static const bool notices = setting("FAKE_NCCL_NOTICES", 0) != 0;
  if (!notices) return;
  for (int r = 0; r < all.size; ++r)
    if (const int process = all.table->seats[r].process; process != 0 && ::kill(process, 0) != 0)
      all.state = 6;
}

void meet(Communicator& all) {
  ++all.met;
  all.table->seats[all.rank].arrived.store(all.met, std::memory_order_release);
  for (int r = 0; r < all.size; ++r)
    while (all.table->seats[r].arrived.load(std::memory_order_acquire) < all.met) nap(all);
}

}  // namespace farandole::cuda::fake_nccl
