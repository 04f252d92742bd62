#include "base/config.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "base/fault.h"
#include "base/spelling.h"

namespace farandole {
namespace {

using Choices = std::vector<std::string_view>;

Error unreadable(std::string_view name, std::string_view text, const std::string& expected) {
  return Error(ErrorCode::invalid_argument,
               std::string(name) + "=" + std::string(text) + " is not " + expected, {},
               "correct the variable, or unset it");
}

/// Cuts off the number that `text` begins with; -1 where there is none. By no locale: that of the
/// program may want 1,5.
double take_number(std::string_view& text) {
  double value = -1;
  const char* const end = std::from_chars(text.data(), text.data() + text.size(), value).ptr;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

/// A variable bound to its member; the type decides how it is read and shown.
struct Variable {
  std::string_view name;
  std::string_view type;
  std::string_view doc;
  std::function<void(Config&, std::string_view)> read;
  std::function<std::string(const Config&)> show;
  bool is_agreed = false;
};

/// 0, or at least `least`.
Variable number(std::string_view name, double Config::* member, std::string_view doc,
                std::string_view least = "0") {
  return {name, "number", doc,
          [=](Config& c, std::string_view text) {
            std::string_view rest = text;
            std::string_view bound = least;
            c.*member = take_number(rest);
            if (!rest.empty() || !(c.*member == 0 || c.*member >= take_number(bound)))
              throw unreadable(name, text,
                               std::string(least == "0" ? "" : "0 or ") + "a number of at least " +
                                   std::string(least));
          },
          [=](const Config& c) {
            std::ostringstream out;
            out << c.*member;
            return out.str();
          }};
}

Variable bytes(std::string_view name, size_t Config::* member, std::string_view doc) {
  return {name, "bytes", doc,
          [=](Config& c, std::string_view text) {
            std::string_view unit = text;
            const double value = take_number(unit);
            const double scale = unit.empty()                   ? 1
                                 : unit == "K" || unit == "KiB" ? 1024
                                 : unit == "M" || unit == "MiB" ? 1024.0 * 1024
                                 : unit == "G" || unit == "GiB" ? 1024.0 * 1024 * 1024
                                                                : -1;
            if (scale < 0 || !(value >= 0) || value > 1e15)
              throw unreadable(name, text, "a size in bytes such as 1048576, 512K, 25M or 2G");
            c.*member = static_cast<size_t>(value * scale);
          },
          [=](const Config& c) { return std::to_string(c.*member); }};
}

Variable count(std::string_view name, size_t Config::* member, std::string_view doc) {
  return {name, "whole number", doc,
          [=](Config& c, std::string_view text) {
            const auto [end, error] =
                std::from_chars(text.data(), text.data() + text.size(), c.*member);
            if (error != std::errc() || end != text.data() + text.size())
              throw unreadable(name, text, "a whole number of at least 0");
          },
          [=](const Config& c) { return std::to_string(c.*member); }};
}

Variable text(std::string_view name, std::string Config::* member, std::string_view doc,
              const Choices& choices = {}) {
  return {name, "text", doc,
          [=](Config& c, std::string_view value) {
            bool known = choices.empty();
            std::string expected = "one of";
            for (std::string_view choice : choices) {
              known = known || value == choice;
              expected += " " + std::string(choice);
            }
            if (!known) throw unreadable(name, value, expected);
            c.*member = value;
          },
          [=](const Config& c) { return c.*member; }};
}

bool is_count(std::string_view text) {
  return !text.empty() && text.size() < 10 && text.front() != '0' &&
         std::ranges::all_of(text, [](char c) { return '0' <= c && c <= '9'; });
}

/// One of the choices, or how many.
Variable choice_or_count(std::string_view name, std::string Config::* member, std::string_view doc,
                         const Choices& choices) {
  Variable variable = text(name, member, doc, choices);
  variable.read = [=, choose = variable.read](Config& c, std::string_view value) {
    if (is_count(value)) {
      c.*member = value;
      return;
    }
    try {
      choose(c, value);
    } catch (const Error& error) {
      throw Error(ErrorCode::invalid_argument, error.verdict() + ", or a number of at least 1");
    }
  };
  return variable;
}

/// Ranks do not meet unless they have the same.
Variable agreed(Variable variable) {
  variable.is_agreed = true;
  return variable;
}

const std::vector<Variable>& variables() {
  static const std::vector<Variable> table{
      number("FARANDOLE_TIMEOUT", &Config::timeout,
             "seconds an operation may wait for other ranks before it fails; 0: for ever"),
      number("FARANDOLE_START_TIMEOUT", &Config::start_timeout,
             "seconds init() waits for all ranks to arrive"),
      number(
          "FARANDOLE_LINK_TIMEOUT", &Config::link_timeout,
          "seconds after which the ranks of a host are lost from which nothing comes, not even an "
          "acknowledgement from its kernel; at least 0.5; 0: never",
          "0.5"),
      number("FARANDOLE_WARN_AFTER", &Config::warn_after,
             "seconds after which a waiting operation names the ranks it waits for"),
      bytes("FARANDOLE_BUCKET_BYTES", &Config::bucket_bytes,
            "size of a bucket, the gradients reduced together; 0: each gradient by itself"),
      bytes("FARANDOLE_FIRST_BUCKET_BYTES", &Config::first_bucket_bytes,
            "size of the first bucket, small so that communication starts early"),
      bytes("FARANDOLE_IN_PLACE_BYTES", &Config::in_place_bytes,
            "a gradient of this size or more is reduced where it lies, not copied into a bucket"),
      agreed(bytes("FARANDOLE_FUSION_BYTES", &Config::fusion_bytes,
                   "how much of the operations by name is reduced together; 0: each by itself")),
      count("FARANDOLE_NAME_CACHE", &Config::name_cache,
            "how many names ranks remember; a remembered one costs a bit in each step"),
      bytes("FARANDOLE_ARENA_BYTES", &Config::arena_bytes,
            "address space for each rank's shared memory; 0: as much as the machine or the cgroup "
            "has "
            "memory, or less where a limit or many ranks leave less"),
      number("FARANDOLE_SPIN_US", &Config::spin_us,
             "microseconds a waiter spins before it parks, given a core for every rank"),
      text("FARANDOLE_PROGRESS", &Config::progress,
           "who drives operations that nobody waits for. thread: a thread of the engine; caller: "
           "the program's own calls; auto: as cores allow",
           {"auto", "thread", "caller"}),
      text(
          "FARANDOLE_CMA", &Config::cma,
          "reaching other ranks' memory by process_vm_readv and writev: auto where it is permitted "
          "and found to be faster than copies through shared memory, 1 where it is permitted, 0 "
          "never",
          {"auto", "1", "0"}),
      agreed(text("FARANDOLE_TRANSPORT", &Config::transport,
                  "what data between ranks go over. auto: shared memory within a host, and between "
                  "hosts MPI where init() was given a communicator, else TCP. shm: shared memory "
                  "alone. tcp, mpi: TCP or MPI everywhere, by schedules alone",
                  {"auto", "shm", "tcp", "mpi"})),
      agreed(
          text("FARANDOLE_WIRE", &Config::wire,
               "what is done with tensors over TCP: plain: they go as they are; checked: they are "
               "sealed, so that a bit that is changed on the way is an error; sealed: everything "
               "between ranks is encrypted, too. Nothing goes over MPI or NCCL then",
               {"plain", "checked", "sealed"})),
      text("FARANDOLE_IFACE", &Config::iface,
           "network interface at which this rank is reached from other hosts; empty: the one that "
           "leads to MASTER_ADDR"),
      text("FARANDOLE_INSECURE", &Config::insecure,
           "1: ranks on several hosts may meet without FARANDOLE_SECRET_FILE; rank 0 then makes a "
           "secret and sends it in the clear",
           {"0", "1"}),
      agreed(text("FARANDOLE_PICKLE", &Config::pickle,
                  "objects that ranks send each other and that are more than plain values, arrays "
                  "and tensors. on: go as pickles; off: are refused, and no pickle is read",
                  {"on", "off"})),
      agreed(text("FARANDOLE_LEVEL", &Config::level,
                  "order of sums. canonical: one order, so the same bits for any algorithm; fast: "
                  "any order",
                  {"canonical", "fast"})),
      text("FARANDOLE_ALGORITHM", &Config::algorithm,
           "forces a path or planner by name (farandole info --why lists them); empty: chosen by "
           "size"),
      agreed(
          text("FARANDOLE_DEVICE_PATH", &Config::device_path,
               "how collectives on arrays of CUDA devices go. staged: by the host's memory; "
               "step: in the devices' streams, where all ranks' arrays lie on one host's; spin: "
               "small ones by one kernel on each rank, also where ranks share a device and their "
               "kernels may not run at once; lanes: by one kernel on each rank that runs a "
               "schedule, likewise; nccl: by NCCL, which takes a device for each rank and "
               "FARANDOLE_LEVEL=fast; auto: the fastest of these, as predicted",
               {"auto", "staged", "step", "spin", "lanes", "nccl"})),
      text("FARANDOLE_NCCL", &Config::nccl,
           "where NCCL is. auto: the one that this process has loaded, that of the wheel "
           "nvidia-nccl, or the loader's; off: it is not used; else the file"),
      agreed(bytes("FARANDOLE_DEVICE_BUCKET_BYTES", &Config::device_bucket_bytes,
                   "memory of a device for one piece of a collective that goes by steps; two are "
                   "under way at once")),
      count("FARANDOLE_DEVICE_LINK_BLOCKS", &Config::device_link_blocks,
            "blocks of a kernel that folds what lies in other devices' memory: more leave less of "
            "the device to backward, fewer than the links need make folds slower. 0: as many as "
            "the fastest links need"),
      agreed(bytes("FARANDOLE_STAGED_PIECE_BYTES", &Config::staged_piece_bytes,
                   "a collective on an array of a device that is longer and goes by the host does "
                   "so in pieces of this size, three at once")),
      text(
          "FARANDOLE_TUNING", &Config::tuning,
          "the measurements that choices follow from, rank 0's for all ranks. auto: those kept for "
          "this kind of host; `farandole run` measures if there are none. kept: those kept, if "
          "any. off: none. Otherwise a file that `farandole tune` has written"),
      agreed(choice_or_count(
          "FARANDOLE_CHECK_WEIGHTS", &Config::check_weights,
          "when ranks compare checksums of their parameters. A number k: in the first two steps, "
          "and every k steps (docs/benchmarks.md says why 2000); first: when it begins; off: never",
          {"first", "off"})),
      agreed(text("FARANDOLE_NUMERICS", &Config::numerics,
                  "a step that uses gradients of which a rank's is NaN or infinite. warn: says it "
                  "once and counts them; error: NumericsError on every rank; off: nobody looks",
                  {"warn", "error", "off"})),
      text("FARANDOLE_LOG", &Config::log_level, "the least severe messages that go to stderr",
           {"error", "warning", "info", "debug"}),
      text("FARANDOLE_TRACE", &Config::trace,
           "directory for a Chrome trace of all ranks; empty: no trace"),
      text("FARANDOLE_TIMELINE", &Config::timeline,
           "file for a Chrome trace of all ranks, from init() to shutdown(); DYNAMIC: none until "
           "start_timeline()"),
      text(
          "FARANDOLE_TF_OP", &Config::tf_op,
          "what an operation is in TensorFlow's graphs. async: one asynchronous op; pair: two ops, "
          "which use documented calls alone; auto: async for the versions of TensorFlow that it "
          "was tested with, else pair",
          {"auto", "async", "pair"}),
      text("FARANDOLE_FAULT", &Config::fault,
           "test builds only: makes a rank fail at a named point, or delays operations"),
  };
  return table;
}

/// One of Horovod's variables, and which of ours it sets to what; empty: to nothing.
struct Alias {
  std::string_view horovod;
  std::string_view ours;
  std::string (*value)(std::string_view);
};

std::string same(std::string_view text) { return std::string(text); }

std::string never_if_set(std::string_view text) { return text.empty() || text == "0" ? "" : "1e9"; }

std::string log_level(std::string_view text) {
  std::string lower(text);
  std::ranges::transform(lower, lower.begin(), [](char c) {
    return 'A' <= c && c <= 'Z' ? static_cast<char>(c + 32) : c;
  });
  return lower == "trace" ? "debug" : lower == "fatal" ? "error" : lower;
}

/// The first one that is set wins.
constexpr std::array kAliases{
    Alias{"HOROVOD_FUSION_THRESHOLD", "FARANDOLE_BUCKET_BYTES", same},
    Alias{"HOROVOD_FUSION_THRESHOLD", "FARANDOLE_FUSION_BYTES", same},
    Alias{"HOROVOD_CACHE_CAPACITY", "FARANDOLE_NAME_CACHE", same},
    Alias{"HOROVOD_TIMELINE", "FARANDOLE_TIMELINE", same},
    Alias{"HOROVOD_STALL_CHECK_DISABLE", "FARANDOLE_WARN_AFTER", never_if_set},
    Alias{"HOROVOD_STALL_CHECK_TIME_SECONDS", "FARANDOLE_WARN_AFTER", same},
    Alias{"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "FARANDOLE_TIMEOUT", same},
    Alias{"HOROVOD_START_TIMEOUT", "FARANDOLE_START_TIMEOUT", same},
    Alias{"HOROVOD_LOG_LEVEL", "FARANDOLE_LOG", log_level},
};

/// Reads the first of Horovod's variables that says something; errors name it.
void read_alias(Config& config, const Variable& variable) {
  for (const Alias& alias : kAliases) {
    const char* given = std::getenv(std::string(alias.horovod).c_str());
    if (alias.ours != variable.name || given == nullptr || *given == 0) continue;
    const std::string value = alias.value(given);
    if (value.empty()) continue;
    try {
      variable.read(config, value);
    } catch (const Error& error) {
      throw Error(ErrorCode::invalid_argument, error.verdict(), {},
                  "it comes from " + std::string(alias.horovod) + "=" + given);
    }
    return;
  }
}

constexpr std::string_view kPrefix = "FARANDOLE_";

/// Set by launchers and by tests for the ranks, not by people.
bool is_read_elsewhere(std::string_view name) {
  return name == "FARANDOLE_RUN_ID" || name == "FARANDOLE_RESTART_COUNT" ||
         name == "FARANDOLE_WORKER" || name == "FARANDOLE_WORKER_PID" ||
         name == "FARANDOLE_SECRET_FILE" || name == "FARANDOLE_SPLIT_HOSTS" ||
         name.starts_with("FARANDOLE_TEST_");
}

}  // namespace

Config Config::from_environment() {
  Config config;
  for (const Variable& v : variables()) {
    const char* value = std::getenv(std::string(v.name).c_str());
    if (value != nullptr)
      v.read(config, value);
    else
      read_alias(config, v);
  }
  if (!config.fault.empty() && !kFaultPoints)
    throw Error(ErrorCode::invalid_argument,
                "FARANDOLE_FAULT is set, but this build has no fault points", {},
                "unset it, or build with -DFARANDOLE_FAULT_POINTS=ON");
  return config;
}

std::vector<Setting> settings(const Config& config) {
  const Config fallback;
  std::vector<Setting> list;
  for (const Variable& v : variables()) {
    std::string horovod;
    for (const Alias& alias : kAliases)
      if (alias.ours == v.name)
        horovod += (horovod.empty() ? "" : " ") + std::string(alias.horovod);
    list.push_back({std::string(v.name), std::string(v.type), v.show(config), v.show(fallback),
                    std::string(v.doc), horovod});
  }
  return list;
}

std::string agreed_settings(const Config& config) {
  std::string list;
  for (const Variable& v : variables())
    if (v.is_agreed)
      list += (list.empty() ? "" : ", ") + std::string(v.name) + "=" + v.show(config);
  return list;
}

std::vector<std::string> unread_variables() {
  std::vector<std::string_view> settable;  // what follows the prefix
  for (const Variable& v : variables()) settable.push_back(v.name.substr(kPrefix.size()));
  std::vector<std::string> lines;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view name(*variable, std::strcspn(*variable, "="));
    if (!name.starts_with(kPrefix) || is_read_elsewhere(name)) continue;
    const std::string_view written = name.substr(kPrefix.size());
    if (std::ranges::find(settable, written) != settable.end()) continue;
    const std::string_view meant = closest(written, settable);
    lines.push_back(std::string(name) + " is not a setting");
    if (!meant.empty())
      lines.back() += "; did you mean " + std::string(kPrefix) + std::string(meant) + "?";
  }
  std::ranges::sort(lines);
  return lines;
}

}  // namespace farandole
