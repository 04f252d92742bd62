#include "transport/mpi_end.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/log.h"
#include "transport/mpi_port.h"

namespace farandole {
namespace {

/// Never freed: MPI_Finalize may come after everything else has been destroyed.
struct Ending {
  std::mutex mutex;  // guards what follows
  bool watched = false;
  std::optional<std::string> abandoned;  // why
  bool by_another = false;
  std::weak_ptr<MpiPort> port;
};
std::atomic<bool> memory_with_mpi{false};

constexpr auto kLastWords = std::chrono::seconds(2);  // of ranks that MPI_Abort will end

/// Never freed, for the same reason.
struct Exit {
  std::unique_ptr<MpiExit> by;
  bool joined;
  pid_t process;
};

Ending& ending_of_mpi() {
  static auto* const ending = new Ending;
  return *ending;
}

void when_mpi_ends() {
  Ending& ending = ending_of_mpi();
  std::shared_ptr<MpiPort> port;
  {
    const std::lock_guard lock(ending.mutex);
    port = ending.port.lock();
    if (ending.abandoned) {
      log(LogLevel::warning, "MPI_Finalize would wait for ever (" + *ending.abandoned +
                                 "); this process ends with exit code 1");
      std::fflush(nullptr);
      ::_exit(1);
    }
  }
  if (port) port->finalize();
}

bool is_abandoned() {
  Ending& ending = ending_of_mpi();
  const std::lock_guard lock(ending.mutex);
  return ending.abandoned.has_value();
}

void end_mpi(int code, void* of) {
  const auto& exit = *static_cast<Exit*>(of);
  if (::getpid() != exit.process || exit.by->is_finalized()) return;
  if (code == 0 || !(exit.joined || is_abandoned())) return exit.by->finalize();
  std::this_thread::sleep_for(kLastWords);
  exit.by->abort(code);
}

}  // namespace

void end_mpi_at_exit(std::unique_ptr<MpiExit> by, bool joined) {
  ::on_exit(&end_mpi, new Exit{std::move(by), joined, ::getpid()});
}

void abandon_mpi(const std::string& why, bool by_another) {
  Ending& ending = ending_of_mpi();
  const std::lock_guard lock(ending.mutex);
  if (!ending.watched || ending.abandoned) return;
  ending.abandoned = why;
  ending.by_another = by_another;
}

bool is_abandoned_by_another() {
  Ending& ending = ending_of_mpi();
  const std::lock_guard lock(ending.mutex);
  return ending.by_another;
}

void watch_the_end_of_mpi(MpiFunctions& functions) {
  Ending& ending = ending_of_mpi();
  const std::lock_guard lock(ending.mutex);
  if (!std::exchange(ending.watched, true)) functions.at_finalize(&when_mpi_ends);
}

void watch_the_end_of_mpi(const std::shared_ptr<MpiPort>& port) {
  Ending& ending = ending_of_mpi();
  const std::lock_guard lock(ending.mutex);
  ending.port = port;
}

void leave_memory_with_mpi() { memory_with_mpi = true; }
bool has_memory_with_mpi() { return memory_with_mpi; }

}  // namespace farandole
