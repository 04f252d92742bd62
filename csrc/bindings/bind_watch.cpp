// A rank shows its threads to the other ranks, by its watch (python/farandole/_watch.py), and its
// counters to readers outside (python/farandole/_live).
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "base/blocked_threads.h"
#include "base/fixed_text.h"
#include "bindings/bind.h"
#include "control/wait_watch.h"
#include "group/group.h"

namespace farandole {
namespace {

/// Keeps the segment, not the engine: it may outlive the world by a moment.
struct Watchpost {
  explicit Watchpost(const Group& world)
      : segment(world.engine()->host().segment), rank(world.engine()->host().rank) {}
  WaitBoard& board() const { return segment->page(rank).board; }

  std::shared_ptr<Segment> segment;
  int rank;
  uint32_t heard = 0;
};

void show(const Watchpost& post, bool blocked, bool daemons, int64_t looked, int64_t still_since,
          const std::string& place, const std::string& step) {
  ThreadReport report;
  report.looked = looked;
  report.still_since = still_since;
  report.state = !blocked  ? ThreadReport::free
                 : daemons ? ThreadReport::daemonic
                           : ThreadReport::blocked;
  copy_cut(place, report.place);
  copy_cut(step, report.step);
  show_threads(post.board(), report);
}

}  // namespace

void bind_watch(py::module_& module) {
  py::class_<Watchpost>(module, "Watchpost", "Where a rank shows what its threads are doing.")
      .def(py::init<const Group&>(), py::arg("world"))
      .def(
          "wait", [](Watchpost& post) { return await_question(post.board(), post.heard); },
          py::call_guard<py::gil_scoped_release>(),
          "Waits until some rank asks (True), or until this rank has left the world (False).")
      .def("show", &show, py::arg("blocked"), py::arg("daemons"), py::arg("looked"),
           py::arg("still_since"), py::arg("place"), py::arg("step"),
           "`blocked`: no thread will do anything unless an operation ends; `daemons`: but for "
           "threads of unknown purpose; `looked`, `still_since`: time.monotonic_ns() of this look, "
           "and since when it has been so.")
      .def("end", [](const Watchpost& post) { end_questions(post.board()); });
  module.def(
      "blocked_threads",
      [] {
        std::map<uint64_t, uint64_t> threads;
        for (const auto& [thread, wait] : BlockedThread::all()) threads[thread] = wait;
        return threads;
      },
      "Threads (threading.get_ident) that wait for operations, each with a number of its wait.");
  module.def(
      "status_page", [](const Group& world) { return py::bytes(world.engine()->status().bytes()); },
      py::arg("world"),
      "The counters of this rank, as python/farandole/_live/pages.py reads them.");
}

}  // namespace farandole
