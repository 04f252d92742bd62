#include "base/fault.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <string>
#include <thread>

#include "base/arm_fault.h"
#include "base/error.h"

namespace farandole {
namespace {

Error bad(std::string_view specification) {
  return Error(ErrorCode::invalid_argument, "FARANDOLE_FAULT=" + std::string(specification) +
                                                " is not of the form rank=R|any,at=POINT#N,"
                                                "do=sigkill|sigstop|sigsegv|exit|sleep:S|delay:S");
}

std::map<std::string, std::string, std::less<>> parse(std::string_view text) {
  std::map<std::string, std::string, std::less<>> fields;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), item.size() + 1));
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos) continue;
    fields[std::string(item.substr(0, equals))] = std::string(item.substr(equals + 1));
  }
  return fields;
}

#ifdef FARANDOLE_FAULT_POINTS
// One armed fault per process, set before any thread of ours starts.
struct Armed {
  std::string point;
  std::string action;
  std::atomic<int> countdown{0};
  Duration latency{};  // of operations whose names begin with `point`
} armed;

void act(const std::string& action) {
  if (action == "sigkill") ::raise(SIGKILL);
  if (action == "sigstop") ::raise(SIGSTOP);
  if (action == "sigsegv") {
    ::signal(SIGSEGV, SIG_DFL);
    ::raise(SIGSEGV);
  }
  if (action == "exit") ::_exit(7);
  if (action.starts_with("sleep:"))
    std::this_thread::sleep_for(std::chrono::duration<double>(std::stod(action.substr(6))));
}
#endif

}  // namespace

#ifdef FARANDOLE_FAULT_POINTS
void fault_point(std::string_view name) {
  if (armed.countdown.load(std::memory_order_relaxed) <= 0 || name != armed.point) return;
  if (armed.countdown.fetch_sub(1, std::memory_order_relaxed) == 1) act(armed.action);
}

Duration fault_latency(std::string_view operation) {
  return fault_latency_armed() && operation.starts_with(armed.point) ? armed.latency : Duration{};
}

bool fault_latency_armed() { return armed.latency > Duration{}; }
#endif

void arm_fault(std::string_view specification, int rank) {
  auto fields = parse(specification);
  std::string point = fields["at"];
  const std::string action = fields["do"];
  const std::string who = fields["rank"];
  if (point.empty() || action.empty() || who.empty()) throw bad(specification);
  int visits = 1;
  if (const size_t hash = point.find('#'); hash != std::string::npos) {
    visits = std::atoi(point.c_str() + hash + 1);
    point.resize(hash);
  }
  const double delay = action.starts_with("delay:") ? std::atof(action.c_str() + 6) : 0;
  if (visits < 1 || (action.starts_with("delay") && delay <= 0)) throw bad(specification);
  if (who != "any" && std::to_string(rank) != who) return;
#ifdef FARANDOLE_FAULT_POINTS
  armed.point = point;
  if (delay > 0) {
    armed.latency = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(delay));
    return;
  }
  armed.action = action;
  armed.countdown.store(visits, std::memory_order_relaxed);
#endif
}

}  // namespace farandole
