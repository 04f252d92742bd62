// Tracing: when it starts and ends, and the program's own spans.
#include "backends/tuning.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/trace_store.h"
#include "bindings/bind.h"
#include "bindings/tracing.h"
#include "control/control_mesh.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>

namespace farandole {
namespace {

/// The process's trace. Worlds start with and without Python's lock, so it has one of its own.
struct CurrentTrace {
  std::mutex mutex;
  std::shared_ptr<Trace> trace;
};

CurrentTrace& current() {
  static auto* kept = new CurrentTrace;  // outlives every thread that records
  return *kept;
}

std::shared_ptr<Trace> current_trace() {
  const std::lock_guard lock(current().mutex);
  return current().trace;
}

void set_current_trace(std::shared_ptr<Trace> trace) {
  const std::lock_guard lock(current().mutex);
  current().trace.swap(trace);  // the one before ends outside
}

/// The run's number, made of facts that all its ranks know and no other run has.
uint64_t run_of(const Host& host, const std::string& job) {
  return hash_of(job + " " + std::to_string(host.peers.front().info.pid));
}

constexpr Duration kComparison = std::chrono::seconds(1);  // of clocks; a few round trips

/// Returns when there is a first reading: a short job may end sooner than clocks are compared.
void wait_for_reading(ControlMesh& mesh) {
  const Deadline until = Deadline::after(kComparison);
  while (mesh.clock().is_new() && !mesh.has_lost(0) && !mesh.has_finished(0) &&
         !until.passed(now()))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

/// Beside the part of a rank whose host has not rank 0's clock: how its times become rank 0's.
void log_clock(const Host& host, const Trace::Identity& me, bool anew) {
  if (!host.mesh || host.peers.front().here) return;
  const std::string path = me.directory + "/rank-" + std::to_string(me.rank) + ".clock";
  char title[64];
  std::snprintf(title, sizeof title, "{\"run\":\"%016llx\",\"rank\":%d}",
                static_cast<unsigned long long>(me.run), me.rank);
  try {
    if (anew) ::unlink(path.c_str());
    host.mesh->clock().follow(path, title);
    wait_for_reading(*host.mesh);
  } catch (const Error& error) {
    log(LogLevel::warning, "times of this rank are not lined up with rank 0's: " + error.verdict());
  }
}

/// A span of the program, as Python's `with` holds it.
class PySpan {
 public:
  explicit PySpan(std::string name) : name_(std::move(name)) {}

  void enter() {
    trace_ = current_trace();
    if (trace_) span_ = std::make_unique<TraceSpan>(trace_.get(), TraceKind::user, name_);
  }
  void exit() { span_.reset(); }

 private:
  std::string name_;
  std::shared_ptr<Trace> trace_;
  std::unique_ptr<TraceSpan> span_;
};

}  // namespace

std::shared_ptr<Trace> start_trace(const std::string& directory, const Host& host,
                                   const std::string& job, const std::string& tuning) {
  const auto goes_on = [&](const Trace& one) {
    return one.identity().directory == directory && one.identity().rank == host.rank;
  };
  auto trace = current_trace();
  if (trace && goes_on(*trace)) {
    trace->next_world();
    log_clock(host, trace->identity(), false);
    return trace;
  }
  set_current_trace(trace = nullptr);
  if (directory.empty()) return nullptr;
  const std::string name = host.peers[static_cast<size_t>(host.rank)].info.host;
  try {
    trace = std::make_shared<Trace>(
        Trace::Identity{directory, run_of(host, job), host.rank, host.size(), name, tuning});
    log_clock(host, trace->identity(), true);
  } catch (const Error& error) {
    log(LogLevel::warning, "nothing is traced: " + error.verdict());
  }
  set_current_trace(trace);
  return trace;
}

void start_timeline(Engine& engine, const std::string& directory, int number) {
  if (engine.trace() != nullptr)
    throw Error(ErrorCode::invalid_argument,
                "this rank is traced into " + engine.trace()->identity().directory + " already");
  const Host& host = engine.host();
  const std::string name = host.peers[static_cast<size_t>(host.rank)].info.host;
  const uint64_t run = run_of(host, "timeline " + std::to_string(number));
  auto trace = std::make_shared<Trace>(Trace::Identity{directory, run, host.rank, host.size(), name,
                                                       fingerprint(*engine.options().tuning)});
  log_clock(host, trace->identity(), true);
  engine.set_trace(trace);
  set_current_trace(trace);
}

void stop_timeline(Engine& engine) {
  Trace* const trace = engine.trace();
  if (trace == nullptr)
    throw Error(ErrorCode::invalid_argument, "nothing is traced, so nothing can be stopped");
  const std::shared_ptr<Trace> kept = current_trace();
  set_current_trace(nullptr);
  engine.set_trace(nullptr);
  if (engine.host().mesh) engine.host().mesh->clock().follow("", "");
  const py::gil_scoped_release unlocked;
  trace->write();
  trace->close();
}

void finish_trace(Trace* trace) {
  if (trace == nullptr) return;
  const Trace::Identity& me = trace->identity();
  try {
    {
      const py::gil_scoped_release unlocked;
      trace->write();
    }
    py::module_::import("farandole._trace")
        .attr("merge_if_complete")(me.directory, me.size, me.rank);
  } catch (const Error& error) {
    log(LogLevel::warning, "the trace of this rank is lost: " + error.verdict());
  } catch (const py::error_already_set& error) {
    log(LogLevel::warning, "the parts of the trace are not merged: " + std::string(error.what()));
  }
}

std::unique_ptr<TraceFollower> follow(const std::string& events_file) {
  const auto trace = current_trace();
  if (trace && trace->store().path() == events_file) return std::make_unique<TraceFollower>(*trace);
  return std::make_unique<TraceFollower>(events_file);
}

void bind_trace(py::module_& module) {
  module.attr("trace_events_per_thread") = Trace::kEventsPerThread;
  module.def(
      "drop_trace_file",
      [] {
        if (const auto trace = current_trace()) trace->drop_file();
      },
      "The process ends: what the trace's events lie in is not needed any more.");
  module.def("recover_trace_part", &recover_trace_part, py::arg("events_file"), py::arg("living"),
             "Writes the part of the rank that left `.rank-N.events`; False where it lives on.");
  py::class_<TraceFollower>(module, "TraceFollower",
                            "Reads `.rank-N.events` of a rank on this host, while it runs.")
      .def(py::init(&follow), py::arg("events_file"))
      .def_property_readonly("host", &TraceFollower::host)
      .def(
          "more",
          [](TraceFollower& follower) {
            std::string lines;
            {
              const py::gil_scoped_release unlocked;
              lines = follower.more();
            }
            return py::bytes(lines);
          },
          "The events since the last call, one a line.");
  py::class_<PySpan>(module, "trace_span",
                     "A span of the program in the trace (FARANDOLE_TRACE): "
                     "`with trace_span(\"forward\"): …`. Does nothing while nothing is traced.")
      .def(py::init<std::string>(), py::arg("name"))
      .def("__enter__",
           [](py::object self) {
             self.cast<PySpan&>().enter();
             return self;
           })
      .def("__exit__", [](PySpan& span, const py::args&) { span.exit(); });
}

}  // namespace farandole
