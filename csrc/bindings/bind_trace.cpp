// Tracing: when it starts and ends, and the program's own spans.
#include "base/log.h"
#include "base/trace_store.h"
#include "bindings/bind.h"
#include "bindings/tracing.h"

#include <utility>

namespace farandole {
namespace {

std::shared_ptr<Trace>& current() {
  static auto* trace = new std::shared_ptr<Trace>;  // outlives every thread that records
  return *trace;
}

/// FNV-1a of what all ranks of this run know and no other run does.
uint64_t run_of(const Host& host, const std::string& job) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : job + " " + std::to_string(host.peers.front().info.pid))
    hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

/// A span of the program, as Python's `with` holds it.
class PySpan {
 public:
  explicit PySpan(std::string name) : name_(std::move(name)) {}

  void enter() {
    trace_ = current();
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
  auto& trace = current();
  if (directory.empty()) return trace = nullptr;
  if (trace && trace->identity().directory == directory && trace->identity().rank == host.rank) {
    trace->next_world();
    return trace;
  }
  const std::string name = host.peers[static_cast<size_t>(host.rank)].info.host;
  trace = nullptr;
  try {
    trace = std::make_shared<Trace>(
        Trace::Identity{directory, run_of(host, job), host.rank, host.size(), name, tuning});
  } catch (const Error& error) {
    log(LogLevel::warning, "nothing is traced: " + error.verdict());
  }
  return trace;
}

void start_timeline(Engine& engine, const std::string& directory, int number) {
  if (engine.trace() != nullptr)
    throw Error(ErrorCode::invalid_argument,
                "this rank is traced into " + engine.trace()->identity().directory + " already");
  const Host& host = engine.host();
  const std::string name = host.peers[static_cast<size_t>(host.rank)].info.host;
  const uint64_t run = run_of(host, "timeline " + std::to_string(number));
  auto trace = std::make_shared<Trace>(
      Trace::Identity{directory, run, host.rank, host.size(), name, fingerprint(engine.tuning())});
  engine.set_trace(trace);
  current() = trace;
}

void stop_timeline(Engine& engine) {
  Trace* const trace = engine.trace();
  if (trace == nullptr)
    throw Error(ErrorCode::invalid_argument, "nothing is traced, so nothing can be stopped");
  const std::shared_ptr<Trace> kept = std::exchange(current(), nullptr);
  engine.set_trace(nullptr);
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

void bind_trace(py::module_& module) {
  module.def(
      "drop_trace_file",
      [] {
        if (current()) current()->drop_file();
      },
      "The process ends: what the trace's events lie in is not needed any more.");
  module.def("recover_trace_part", &recover_trace_part, py::arg("events_file"), py::arg("living"),
             "Writes the part of the rank that left `.rank-N.events`; False where it lives on.");
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
