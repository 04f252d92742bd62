// Children by vfork and posix_spawn: no fork handler runs in them, and until their exec they use
// the memory of the rank that made them.
#include "engines.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <mutex>
#include <set>

#include "engine/fork.h"

using namespace farandole;
using testing::run_groups;
using testing::Sum;

namespace {

/// The exit status of a child that execs `program`, or 127. A vforked child may only exec or exit.
int status_of_vforked(const char* program) {
  const pid_t child = ::vfork();  // NOLINT: what is tested
  if (child == 0) {
    ::execl(program, program, static_cast<char*>(nullptr));
    ::_exit(127);
  }
  int status = -1;
  CHECK_EQUAL(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int status_of_spawned(const char* program) {
  pid_t child = 0;
  std::string name(program);
  const std::array<char*, 2> arguments{name.data(), nullptr};
  if (::posix_spawn(&child, program, nullptr, nullptr, arguments.data(), environ) != 0) return 127;
  int status = -1;
  CHECK_EQUAL(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void register_one_at_a_time(const std::shared_ptr<Engine>& engine) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  hide_from_children(engine);
}

/// Descriptors that a program started now would have.
std::set<int> inherited() {
  std::set<int> found;
  for (int fd = 0; fd < 1024; ++fd) {
    const int flags = ::fcntl(fd, F_GETFD);
    if (flags >= 0 && (flags & FD_CLOEXEC) == 0) found.insert(fd);
  }
  return found;
}

void check_beside(int (*status_of)(const char* program)) {
  run_groups(2, ProgressMode::thread, [&](const std::shared_ptr<Group>& group) {
    register_one_at_a_time(group->engine());
    for (int i = 0; i < 10; ++i) {
      Sum sum(group->rank(), 2, 50'000);
      const Handle handle = group->submit(sum.buffer(), sum.buffer(), {{Collective::all_reduce}});
      CHECK_EQUAL(status_of("/bin/true"), 0);
      CHECK_EQUAL(status_of("/no/such/program"), 127);
      CHECK_EQUAL(testing::error_of(handle), "");
      CHECK(sum.is_right());
      CHECK(!in_child());
    }
  });
}

}  // namespace

TEST(vfork_beside_an_engine_leaves_it_alone) {
  watch_for_forks();
  check_beside(status_of_vforked);
}

TEST(posix_spawn_beside_an_engine_leaves_it_alone) {
  watch_for_forks();
  check_beside(status_of_spawned);
}

TEST(every_descriptor_of_an_engine_closes_at_exec) {
  const std::set<int> before = inherited();
  run_groups(2, ProgressMode::thread, [&](const std::shared_ptr<Group>& group) {
    Sum sum(group->rank(), 2, 50'000);
    group->submit(sum.buffer(), sum.buffer(), {{Collective::all_reduce}}).wait(testing::patience());
    CHECK(inherited() == before);
  });
}
