// Ranks that are threads of this process, each with an engine of its own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/mesh.h"
#include "check.h"
#include "group/group.h"
#include "world.h"

namespace testing {

/// Far beyond what anything here takes, under a sanitizer on a busy machine.
inline farandole::Deadline patience() {
  return farandole::Deadline::after(std::chrono::minutes(2));
}

inline farandole::EngineOptions engine_options(farandole::ProgressMode mode,
                                               farandole::Wire wire = farandole::Wire::plain) {
  farandole::EngineOptions options;
  options.progress = mode;
  farandole::lay_mesh(options, {}, "auto", nullptr, wire);
  options.warn_after = std::chrono::hours(1);
  return options;
}

/// Runs body(world group) on a thread per rank; the engines end with their threads.
template <typename Body>
void run_groups(int size, farandole::ProgressMode mode, Body body) {
  auto hosts = farandole::hosts_in_process(size, World::kArenaBytes);
  run_ranks(size, [&](int rank) {
    auto engine = std::make_shared<farandole::Engine>(std::move(hosts[static_cast<size_t>(rank)]),
                                                      engine_options(mode));
    body(farandole::Group::world(std::move(engine), {}, patience()));
  });
}

template <typename T>
farandole::Buffer buffer_of(std::vector<T>& data, farandole::DType dtype) {
  return {reinterpret_cast<std::byte*>(data.data()), data.size(), dtype};
}

/// An all-reduce of `count` ones times (rank + 1): every element becomes size * (size + 1) / 2.
struct Sum {
  Sum(int rank, int size, size_t count) : data(count, rank + 1), expected(size * (size + 1) / 2) {}
  farandole::Buffer buffer() { return buffer_of(data, farandole::DType::int32); }
  bool is_right() const {
    for (const int32_t x : data)
      if (x != expected) return false;
    return true;
  }
  std::vector<int32_t> data;
  int32_t expected;
};

/// The error that `handle` ends with; none when it succeeds. A failed check when it does not end.
inline std::string error_of(const farandole::Handle& handle) {
  try {
    if (!handle.wait(patience())) fail(__FILE__, __LINE__, "an operation does not end");
  } catch (const farandole::Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace testing
