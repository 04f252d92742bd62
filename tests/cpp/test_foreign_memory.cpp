// Other processes' memory: what is copied, what stops it, and who is above whom.
#include "transport/foreign_memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "check.h"
#include "control/foreign_access.h"

using namespace farandole;

namespace {

uint64_t address(const void* data) { return reinterpret_cast<uint64_t>(data); }

/// A process that only waits, until the end of the scope.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) {
      for (;;) ::pause();
    }
  }
  ~Child() { end(); }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  pid_t pid() const { return pid_; }
  void end() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_;
};

}  // namespace

TEST(foreign_memory_is_read_and_written_where_it_lies) {
  std::vector<std::byte> memory(3 * 4096 + 17, std::byte{1});
  Child child;  // has a copy of it, at the same place
  std::vector<std::byte> copy(memory.size(), std::byte{2});
  CHECK_EQUAL(write_foreign(child.pid(), address(memory.data()), copy.data(), copy.size()), 0);
  std::vector<std::byte> back(memory.size());
  CHECK_EQUAL(read_foreign(child.pid(), back.data(), address(memory.data()), back.size()), 0);
  CHECK(back == copy);
  CHECK(memory[0] == std::byte{1});
  CHECK_EQUAL(read_foreign(child.pid(), back.data(), 0, 0), 0);
}

TEST(foreign_memory_that_ends_early_or_may_not_be_written_is_a_bad_address) {
  constexpr size_t kPage = 4096;
  void* mapped =
      ::mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(mapped != MAP_FAILED);
  ::munmap(static_cast<std::byte*>(mapped) + kPage, kPage);
  std::vector<std::byte> here(2 * kPage);
  CHECK_EQUAL(read_foreign(::getpid(), here.data(), address(mapped), kPage), 0);
  CHECK_EQUAL(read_foreign(::getpid(), here.data(), address(mapped), 2 * kPage), EFAULT);
  ::mprotect(mapped, kPage, PROT_READ);
  CHECK_EQUAL(write_foreign(::getpid(), address(mapped), here.data(), kPage), EFAULT);
  ::munmap(mapped, kPage);
}

TEST(foreign_memory_of_a_process_that_has_ended_is_gone) {
  Child child;
  const pid_t pid = child.pid();
  child.end();
  int here = 0;
  CHECK_EQUAL(read_foreign(pid, reinterpret_cast<std::byte*>(&here), address(&here), sizeof here),
              ESRCH);
}

TEST(the_nearest_common_ancestor_is_the_process_that_started_both) {
  const Child one;
  const Child other;
  CHECK_EQUAL(nearest_common_ancestor({one.pid(), other.pid()}), ::getpid());
  CHECK_EQUAL(nearest_common_ancestor({one.pid(), ::getpid()}), ::getpid());
  CHECK_EQUAL(nearest_common_ancestor({one.pid()}), one.pid());
  CHECK_EQUAL(nearest_common_ancestor({}), 0);
}
