#include "state.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <utility>

#include "control.h"

namespace farandole::cuda::fake {
namespace {

std::atomic<pid_t> process{0};  // that has initialized the driver

/// Nothing of it may be called after a fork, in which only what is atomic can be trusted.
std::atomic<int> calls_in_child{0};

std::vector<std::string> parts(const std::string& text) {
  std::vector<std::string> found;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) found.push_back(part);
  return found;
}

void add_failures(State& all, const std::string& text) {
  for (const std::string& part : parts(text)) {
    const size_t number = part.find('#'), code = part.find('=');
    all.failures.push_back({part.substr(0, number), std::atoi(part.c_str() + number + 1),
                            std::atoi(part.c_str() + code + 1)});
  }
}

void read_environment(State& all) {
  for (const char* name :
       {"devices", "version", "capability", "memory", "name", "virtual_memory", "host_register",
        "peers", "lacks", "jitter", "deinitialized", "fail", "memory_operations", "stream_room",
        "multicast", "mps", "multiprocessors", "drops"}) {
    std::string variable = "FAKE_CUDA_";
    for (const char* c = name; *c != 0; ++c) variable += static_cast<char>(std::toupper(*c));
    if (const char* value = std::getenv(variable.c_str())) configure(all, name, value);
  }
}

std::string lines(const std::vector<std::string>& all) {
  std::string text;
  for (const std::string& line : all) text += line + "\n";
  return text;
}

/// The code that a test wants from this call.
int failure_of(State& all, const char* name) {
  for (auto it = all.failures.begin(); it != all.failures.end(); ++it)
    if (it->call == name && --it->nth == 0) {
      const int code = it->code;
      all.failures.erase(it);
      return code;
    }
  return kSuccess;
}

/// Errors of kernels, which a later call reports, lose the context. Other codes concern the driver
/// (no device) or the call alone.
bool loses_context(int code) {
  return code == 214 || code == 220 || code == 226 ||
         (code >= 700 && code <= 721 && is_lasting(code));
}

}  // namespace

State& state() {
  static auto* const all = [] {
    auto* made = new State;
    read_environment(*made);
    return made;
  }();
  return *all;
}

std::vector<CUctx_st*>& current_contexts() {
  thread_local std::vector<CUctx_st*> stack;
  return stack;
}

bool& in_host_function() {
  thread_local bool inside = false;
  return inside;
}

bool is_forked_child() {
  const pid_t owner = process.load();
  return owner != 0 && owner != ::getpid();
}

bool in_forked_child() {
  if (!is_forked_child()) return false;
  ++calls_in_child;
  return true;
}

void configure(State& all, const std::string& name, const std::string& value) {
  Config& config = all.config;
  const auto number = static_cast<int>(std::strtol(value.c_str(), nullptr, 10));
  if (name == "devices")
    config.devices = number;
  else if (name == "version")
    config.version = number;
  else if (name == "capability")
    config.capability = number;
  else if (name == "memory")
    config.memory = std::strtoull(value.c_str(), nullptr, 10);
  else if (name == "name")
    config.name = value;
  else if (name == "lacks")
    config.lacks = value;
  else if (name == "drops")
    config.drops = value;
  else if (name == "virtual_memory")
    config.virtual_memory = number != 0;
  else if (name == "host_register")
    config.host_register = number != 0;
  else if (name == "peers")
    config.peers = number != 0;
  else if (name == "memory_operations")
    config.memory_operations = number != 0;
  else if (name == "stream_room")
    config.stream_room = static_cast<size_t>(number);
  else if (name == "mps")
    config.mps = number != 0;
  else if (name == "multiprocessors")
    config.multiprocessors = static_cast<int>(number);
  else if (name == "multicast")
    config.multicast = number != 0;
  else if (name == "deinitialized")
    config.deinitialized = number != 0;
  else if (name == "jitter")
    config.jitter = std::strtoull(value.c_str(), nullptr, 10);
  else if (name == "fail")
    add_failures(all, value);
  else
    all.blame("the fake driver has no setting " + name);
}

int begin(State& all, const char* name, Needs needs) {
  all.log.push_back(name);
  if (in_host_function()) {
    all.blame(std::string(name) + " is called by a host function");
    return 800;
  }
  if (all.config.deinitialized) return kDeinitialized;
  CUctx_st* const context = current_contexts().empty() ? nullptr : current_contexts().back();
  if (const int code = failure_of(all, name); code != kSuccess) {
    if (loses_context(code) && context != nullptr) {
      context->lost = code;
      all.changed.notify_all();
    }
    return code;
  }
  if (const int code = spoil(all, name); code != kSuccess) return code;
  if (needs == Needs::nothing) return kSuccess;
  if (!all.initialized) return 3;
  if (needs == Needs::driver) return kSuccess;
  if (context == nullptr) return 201;
  return context->lost;
}

Region* State::region_of(const char* call, DevicePointer address, size_t bytes) {
  const auto after = regions.upper_bound(address);
  if (after != regions.begin()) {
    auto& [base, region] = *std::prev(after);
    const bool begins_in_it = address - base < region.bytes;
    if (begins_in_it && bytes <= region.bytes - (address - base) && region.accessible)
      return &region;
    if (begins_in_it)
      blame(std::string(call) + " uses addresses beyond the end of what was allocated");
  }
  const auto later = gone.upper_bound(address);
  if (later != gone.begin() && address < std::prev(later)->first + std::prev(later)->second)
    blame(std::string(call) + " uses memory that was freed");
  return nullptr;
}

size_t State::used_memory() const {
  size_t used = 0;
  for (const auto& [base, region] : regions)
    if (region.kind == RegionKind::allocated) used += region.bytes;
  for (const auto& [handle, physical] : physicals) used += physical.bytes;
  return used;
}

std::string State::alive_in(const CUctx_st* context) const {
  std::string text;
  const auto count = [&](size_t n, const char* what) {
    if (n > 0)
      text += (text.empty() ? "" : ", ") + std::to_string(n) + " " + what + (n > 1 ? "s" : "");
  };
  const auto belongs = [&](const CUctx_st* owner) {
    return context == nullptr || owner == context;
  };
  const auto among = [&](const auto& all) {
    return static_cast<size_t>(
        std::ranges::count_if(all, [&](const auto* thing) { return belongs(thing->context); }));
  };
  const auto regions_of = [&](RegionKind kind) {
    return static_cast<size_t>(std::ranges::count_if(regions, [&](const auto& entry) {
      return entry.second.kind == kind && belongs(entry.second.context);
    }));
  };
  if (context == nullptr) count(primary.size(), "context");
  count(among(streams), "stream");
  count(among(events), "event");
  count(among(modules), "module");
  count(regions_of(RegionKind::allocated), "allocation");
  count(regions_of(RegionKind::opened), "opened allocation");
  count(regions_of(RegionKind::mapped), "mapping");
  count(regions_of(RegionKind::pinned), "pinned allocation");
  count(regions_of(RegionKind::registered), "registration");
  count(static_cast<size_t>(std::ranges::count_if(
            physicals, [&](const auto& entry) { return belongs(entry.second.context); })),
        "physical allocation");
  if (context == nullptr) count(reserved.size(), "reservation");
  return text;
}

}  // namespace farandole::cuda::fake

using namespace farandole::cuda;
using namespace farandole::cuda::fake;

namespace {

std::string& answer() {
  static auto* const text = new std::string;
  return *text;
}

const char* misuse() {
  if (is_forked_child()) {  // in which the mutex may be locked for ever
    const int n = calls_in_child;
    return (answer() = n > 0 ? std::to_string(n) + " calls in a forked child\n" : "").c_str();
  }
  const Lock lock(state().mutex);
  return (answer() = lines(state().misuse)).c_str();
}

const char* alive() {
  const Lock lock(state().mutex);
  return (answer() = state().alive_in(nullptr)).c_str();
}

constexpr FakeControl kControl{
    [] {
      Lock lock(state().mutex);
      State& all = state();
      all.config = {};
      all.failures.clear();
      all.log.clear();
      all.launches.clear();
      all.misuse.clear();
      all.gone.clear();
      all.initialized = all.held = false;
      read_environment(all);
    },
    [](const char* name, const char* value) {
      const Lock lock(state().mutex);
      configure(state(), name, value);
    },
    [](const char* call, int nth, int code) {
      const Lock lock(state().mutex);
      state().failures.push_back({call, nth, code});
    },
    [](int code) {
      const Lock lock(state().mutex);
      for (const auto& [device, context] : state().primary) context->lost = code;
      state().changed.notify_all();
    },
    [](bool held) {
      const Lock lock(state().mutex);
      state().held = held;
      state().changed.notify_all();
    },
    [](const char* call) {
      const Lock lock(state().mutex);
      return static_cast<size_t>(std::ranges::count(state().log, std::string_view(call)));
    },
    [] {
      const Lock lock(state().mutex);
      answer().clear();
      for (const char* name : state().log) answer() += std::string(name) + "\n";
      return answer().c_str();
    },
    [] {
      const Lock lock(state().mutex);
      state().log.clear();
      state().launches.clear();
    },
    [] {
      const Lock lock(state().mutex);
      answer().clear();
      for (const auto& [kernel, how] : state().launches)
        answer() +=
            kernel + " " + std::to_string(how.first) + " " + std::to_string(how.second) + "\n";
      return answer().c_str();
    },
    misuse,
    alive,
    [] {
      Lock lock(state().mutex);
      State& all = state();
      const auto ending = std::exchange(all.primary, {});
      for (const auto& [device, context] : ending) {
        end_streams(lock, context);
        free_all(all, context);
      }
      all.misuse.clear();
    },
};

/// For programs that have no access to the control: what was wrong goes to a file.
__attribute__((destructor)) void report() {
  const char* const file = std::getenv("FAKE_CUDA_REPORT");
  if (file == nullptr) return;
  const std::string text = std::string(misuse()) + alive();
  std::ofstream(file, std::ios::app) << text << (text.empty() ? "" : "\n");
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const FakeControl*
farandole::cuda::fake_cuda_control() {
  return &kControl;
}

FAKE_CUDA cuInit(unsigned flags) {
  return call("cuInit", Needs::nothing, [&](State& all, Lock&, CUctx_st*) {
    if (flags != 0) return kInvalidValue;
    all.visible.clear();
    for (int i = 0; i < all.config.devices; ++i) all.visible.push_back(i);
    if (const char* named = std::getenv("CUDA_VISIBLE_DEVICES")) {
      all.visible.clear();
      for (const std::string& part : parts(named)) {  // what it does not know ends the list
        char* end = nullptr;
        const long number = std::strtol(part.c_str(), &end, 10);
        if (part.empty() || *end != 0 || number < 0 || number >= all.config.devices) break;
        all.visible.push_back(static_cast<int>(number));
      }
    }
    if (all.visible.empty()) return kNoDevice;
    all.initialized = true;
    process = ::getpid();
    return kSuccess;
  });
}

FAKE_CUDA cuDriverGetVersion(int* version) {
  return call("cuDriverGetVersion", Needs::nothing, [&](State& all, Lock&, CUctx_st*) {
    *version = all.config.version;
    return kSuccess;
  });
}
