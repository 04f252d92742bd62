// Groups, and handles of their operations.
#include <pybind11/stl.h>

#include <exception>
#include <string>

#include "backends/tuning.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/calls.h"
#include "bindings/device_arrays.h"
#include "bindings/quick_call.h"
#include "bindings/tracing.h"
#include "bindings/waiting.h"
#include "engine/fork.h"
#include "group/group.h"

namespace farandole {

void bind_group(py::module_& module) {
  module.def(
      "quick_call",
      [](const std::string& kind, const py::object& world) {
        return py::cpp_function(
            [kind, world](const py::object& slow) { return make_quick_call(kind, world, slow); });
      },
      py::arg("kind"), py::arg("world"),
      "Decorates the function of a collective with a quick way past it for the calls that most "
      "programs make; the default group is the attribute `group` of `world`.");
  py::class_<PyHandle>(module, "Handle", "An operation in flight.")
      .def("wait", &PyHandle::wait, py::arg("timeout") = py::none(),
           "Waits and returns the result; raises the operation's error, or TimeoutError after "
           "`timeout` seconds (the operation then goes on).")
      .def(
          "done", [](const PyHandle& h) { return h.is_done(); },
          "Whether wait() would return at once.");

  py::class_<Group, std::shared_ptr<Group>>(module, "Group", "A communicator.", kEndsUnlocked)
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("size", &Group::size)
      .def_property_readonly("ranks", &Group::members)
      .def(
          "run",
          [](const std::shared_ptr<Group>& group, const std::string& kind, const py::object& input,
             const py::object& output, const std::string& op, double prescale, double postscale,
             int root, const py::object& name, const py::object& algorithm, const py::object& level,
             const py::object& timeout, const std::vector<size_t>& counts) {
            refuse_in_child();
            Options options = options_from(kind, op, prescale, postscale, root, name, algorithm,
                                           level, timeout, counts);
            if (is_on_device(input) || is_on_device(output)) {
              StagedCall staged = submit_staged(*group, input, output, std::move(options), true);
              wait_for(group, [&](Deadline d) { return staged.wait(d); });
              hand_over(staged, handed_over(input, output));
              return;
            }
            const BorrowedOperand call = borrow_both(input, output);
            const Handle handle =
                group->submit(call.input.buffer, call.output.buffer, std::move(options), true);
            wait_for(group, [&](Deadline d) { return handle.wait(d); });
          },
          py::arg("kind"), py::arg("input"), py::arg("output"), py::arg("op") = "sum",
          py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("root") = 0,
          py::arg("name") = py::none(), py::arg("algorithm") = py::none(),
          py::arg("level") = py::none(), py::arg("timeout") = py::none(),
          py::arg("counts") = std::vector<size_t>{})
      .def(
          "start",
          [](const std::shared_ptr<Group>& group, const std::string& kind, const py::object& input,
             const py::object& output, const py::object& result, const std::string& op,
             double prescale, double postscale, int root, const py::object& name,
             const py::object& algorithm, const py::object& level, const py::object& timeout,
             const std::vector<size_t>& counts) {
            refuse_in_child();
            Options options = options_from(kind, op, prescale, postscale, root, name, algorithm,
                                           level, timeout, counts);
            if (is_on_device(input) || is_on_device(output)) {
              StagedCall staged = submit_staged(*group, input, output, std::move(options), false);
              if (staged.is_captured()) wait_for(group, [&](Deadline d) { return staged.wait(d); });
              return handle_of(group, std::move(staged), handed_over(input, output), result);
            }
            const BorrowedOperand call = borrow_both(input, output);
            options.keepalive = keep(call.input.owner, call.output.owner);
            return PyHandle(
                group, group->submit(call.input.buffer, call.output.buffer, std::move(options)),
                result);
          },
          py::arg("kind"), py::arg("input"), py::arg("output"), py::arg("result"),
          py::arg("op") = "sum", py::arg("prescale") = 1.0, py::arg("postscale") = 1.0,
          py::arg("root") = 0, py::arg("name") = py::none(), py::arg("algorithm") = py::none(),
          py::arg("level") = py::none(), py::arg("timeout") = py::none(),
          py::arg("counts") = std::vector<size_t>{})
      .def(
          "barrier",
          [](const std::shared_ptr<Group>& group, const py::object& name,
             const py::object& timeout) {
            refuse_in_child();
            Options options;
            if (!name.is_none()) options.name = text_from(name, "name");
            options.deadline = own_deadline(timeout);
            const Handle handle = group->submit({}, {}, std::move(options), true);
            wait_for(group, [&](Deadline d) { return handle.wait(d); });
          },
          py::arg("name") = py::none(), py::arg("timeout") = py::none())
      .def(
          "split",
          [](Group& group, int color, int key, double timeout) {
            refuse_in_child();
            const py::gil_scoped_release unlocked;
            return group.split(color, key, Deadline::after_seconds(timeout), look_for_signals);
          },
          py::arg("color"), py::arg("key") = 0, py::arg("timeout") = 300.0)
      .def(
          "form",
          [](Group& group, const std::vector<int>& ranks, uint64_t token, double timeout) {
            refuse_in_child();
            const py::gil_scoped_release unlocked;
            return group.form(ranks, token, Deadline::after_seconds(timeout));
          },
          py::arg("ranks"), py::arg("token"), py::arg("timeout") = 300.0,
          "The group of some ranks, made by these alone; they give the same token, used once.")
      .def(
          "turn",
          [](Group& group) {
            refuse_in_child();
            const py::gil_scoped_release unlocked;
            group.engine()->driver().turn(Driver::kTurn);
          },
          "Brings on what is in flight, for a millisecond at most, if nobody else does.")
      .def(
          "abort",
          [](Group& group, const py::object& reason) {
            refuse_in_child();
            const std::string why = text_from(reason, "reason");
            Context where;
            where.rank = world_rank(group);
            group.abort(Error(ErrorCode::aborted,
                              "rank " + std::to_string(where.rank) + " aborted: " + why, where));
          },
          py::arg("reason"))
      .def("check",
           [](const Group& group) {
             refuse_in_child();
             group.check();
           })
      .def(
          "allocate",
          [](Group& group, size_t bytes) {
            refuse_in_child();
            return std::make_shared<SharedMemory>(SharedMemory{group.allocate(bytes), bytes});
          },
          py::arg("bytes"))
      .def("describe", &Group::describe)
      .def_property_readonly(
          "tuning", [](const Group& g) { return text_of(*g.engine()->options().tuning); },
          "The tuning table that all ranks of the world choose from, as text.")
      .def_property_readonly(
          "by_address",
          [](const Group& g) {
            const ForeignAccess& foreign = g.engine()->host().foreign;
            return py::make_tuple(foreign.preferred, foreign.why_not);
          },
          "(whether the ranks reach each other's memory by address, else why not).")
      .def_property_readonly("last_path", [](const Group& g) { return std::string(g.last_way()); })
      .def("counters",
           [](const Group& g) {
             const EngineCounters c = g.engine()->counters();
             py::dict d;
             d["turns"] = c.turns;
             d["arena_bytes"] = c.arena_bytes;
             d["arena_allocations"] = c.arena_allocations;
             d["streams"] = c.streams;
             return d;
           })
      .def(
          "start_timeline",
          [](Group& g, const py::object& directory, int number) {
            refuse_in_child();
            start_timeline(*g.engine(), text_from(directory, "directory"), number);
          },
          py::arg("directory"), py::arg("number"),
          "Records from now on, on this rank; `number` is the same on all ranks that do so.")
      .def(
          "stop_timeline", [](Group& g) { stop_timeline(*g.engine()); },
          "Ends what start_timeline began, and writes this rank's part into its directory.");
}

}  // namespace farandole
