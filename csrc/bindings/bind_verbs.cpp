// Between two ranks, and many arrays at once.
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>

#include "bindings/bind.h"
#include "bindings/calls.h"
#include "bindings/device_arrays.h"
#include "engine/fork.h"
#include "group/grouped.h"

namespace farandole {
namespace {

using Arrays = std::vector<py::object>;

Collective direction_from(const std::string& kind) {
  if (kind == "send") return Collective::send;
  if (kind == "recv") return Collective::recv;
  throw Error(ErrorCode::invalid_argument, "'" + kind + "' is neither send nor recv");
}

Options options_between(const std::string& kind, const py::object& name,
                        const py::object& timeout) {
  Options options;
  options.kind = direction_from(kind);
  if (!name.is_none()) options.name = text_from(name, "name");
  options.deadline = own_deadline(timeout);
  return options;
}

void run_between(const std::shared_ptr<Group>& group, const std::string& kind,
                 const py::object& array, int peer, int tag, const py::object& name,
                 const py::object& timeout) {
  refuse_in_child();
  Options options = options_between(kind, name, timeout);
  if (is_on_device(array)) {
    StagedCall staged = submit_staged_between(*group, array, peer, tag, std::move(options), true);
    wait_for(group, [&](Deadline d) { return staged.wait(d); });
    return hand_over(staged, array);
  }
  const Borrowed borrowed = borrow(array, kind == "recv", "array");
  const Handle handle = group->submit_between(peer, tag, borrowed.buffer, std::move(options), true);
  wait_for(group, [&](Deadline d) { return handle.wait(d); });
}

PyHandle start_between(const std::shared_ptr<Group>& group, const std::string& kind,
                       const py::object& array, int peer, int tag, const py::object& result,
                       const py::object& name, const py::object& timeout) {
  refuse_in_child();
  Options options = options_between(kind, name, timeout);
  if (is_on_device(array))
    return handle_of(group,
                     submit_staged_between(*group, array, peer, tag, std::move(options), false),
                     array, result);
  const Borrowed borrowed = borrow(array, kind == "recv", "array");
  options.keepalive = keep(borrowed.owner, py::none());
  return {group, group->submit_between(peer, tag, borrowed.buffer, std::move(options), false),
          result};
}

/// The sender of data that were received from any rank.
struct Source {
  std::shared_ptr<const int> rank;
};

PyHandle start_from_any(const std::shared_ptr<Group>& group, const py::object& array, int tag,
                        const py::object& name, const py::object& timeout) {
  refuse_in_child();
  Options options = options_between("recv", name, timeout);
  if (is_on_device(array)) {
    auto [call, source] = submit_staged_from_any(*group, array, tag, std::move(options));
    return handle_of(group, std::move(call), array, py::cast(Source{std::move(source)}));
  }
  const Borrowed borrowed = borrow(array, true, "array");
  options.keepalive = keep(borrowed.owner, py::none());
  auto [handle, source] = group->submit_from_any(tag, borrowed.buffer, std::move(options));
  return {group, handle, py::cast(Source{std::move(source)})};
}

// An operation costs about what copying the longest that is packed twice does.
constexpr PackLimits kLimits{.together = 1 << 20, .alone = (32 << 10) + 1};

std::vector<Operand> operands_of(const Arrays& inputs, const Arrays& outputs) {
  std::vector<Operand> operands;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const BorrowedOperand call = borrow_both(inputs[i], outputs[i]);
    operands.push_back({call.input.buffer, call.output.buffer});
  }
  return operands;
}

/// A grouped call under way, wherever its arrays lie.
struct BegunGrouped {
  WaitUntil wait;
  std::function<bool()> done;
  std::function<void()> after_wait;
  bool is_captured = false;  // it becomes part of a CUDA graph, and is waited for at once
};

BegunGrouped begin_grouped(Group& group, const std::string& kind, const Arrays& inputs,
                           const Arrays& outputs, Options options, bool waits) {
  if (!Grouped::has(options.kind))
    throw Error(ErrorCode::invalid_argument, "there is no grouped " + kind);
  if (inputs.size() != outputs.size())
    throw Error(ErrorCode::invalid_argument, std::to_string(inputs.size()) + " inputs and " +
                                                 std::to_string(outputs.size()) + " outputs");
  if (options.name.empty()) options.name = "grouped";
  if (std::ranges::any_of(inputs, is_on_device) || std::ranges::any_of(outputs, is_on_device)) {
    const auto staged =
        submit_staged_grouped(group, inputs, outputs, std::move(options), kLimits, waits);
    return {[staged](Deadline d) { return staged->wait(d); }, [staged] { return staged->done(); },
            [staged, outputs] { hand_over(*staged, outputs); }, staged->is_captured()};
  }
  if (!waits) options.keepalive = keep(py::cast(inputs), py::cast(outputs));
  const auto grouped =
      std::make_shared<Grouped>(group, operands_of(inputs, outputs), options, kLimits);
  grouped->submit(waits);
  return {[grouped](Deadline d) { return grouped->wait(d); },
          [grouped] { return grouped->done(); },
          {}};
}

/// One call of several: kind, input, output, result, op, prescale, root, counts.
using Asked = std::tuple<std::string, py::object, py::object, py::object, std::string, double, int,
                         std::vector<size_t>>;

std::vector<PyHandle> start_together(const std::shared_ptr<Group>& group,
                                     const std::vector<Asked>& calls, const std::string& name,
                                     const py::object& timeout) {
  refuse_in_child();
  std::vector<CollectiveCall> items;
  std::vector<std::optional<StagedCall>> staged;
  for (const auto& [kind, input, output, result, op, prescale, root, counts] : calls) {
    Options options = options_from(kind, op, prescale, 1, root, py::str(name), py::none(),
                                   py::none(), timeout, counts);
    staged.emplace_back();
    if (is_on_device(input) || is_on_device(output)) {
      staged.back() =
          prepare_staged(*group, input, output, std::move(options), items.emplace_back());
      continue;
    }
    const BorrowedOperand call = borrow_both(input, output);
    options.keepalive = keep(call.input.owner, call.output.owner);
    items.push_back({{call.input.buffer, call.output.buffer}, std::move(options)});
  }
  std::vector<PyHandle> handles;
  for (const Handle& handle : group->submit_together(name, std::move(items))) {
    const Asked& asked = calls[handles.size()];
    std::optional<StagedCall>& call = staged[handles.size()];
    if (call) call->begin(handle);
    handles.push_back(
        call ? handle_of(group, std::move(*call), std::get<2>(asked), std::get<3>(asked))
             : PyHandle(group, handle, std::get<3>(asked)));
  }
  return handles;
}

}  // namespace

void bind_verbs(py::module_& module) {
  py::class_<Source>(module, "Source", "What waiting for start_from_any gives.")
      .def_property_readonly("rank", [](const Source& source) { return *source.rank; });
  py::class_<Group, std::shared_ptr<Group>> group = module.attr("Group");
  group
      .def("run_between", &run_between, py::arg("kind"), py::arg("array"), py::arg("peer"),
           py::arg("tag") = 0, py::arg("name") = py::none(), py::arg("timeout") = py::none(),
           "Sends or receives.")
      .def("start_between", &start_between, py::arg("kind"), py::arg("array"), py::arg("peer"),
           py::arg("tag"), py::arg("result"), py::arg("name") = py::none(),
           py::arg("timeout") = py::none())
      .def("start_from_any", &start_from_any, py::arg("array"), py::arg("tag"),
           py::arg("name") = py::none(), py::arg("timeout") = py::none(),
           "Receives from whoever sends first by this tag; wait() gives the Source.")
      .def("start_together", &start_together, py::arg("calls"), py::arg("name"),
           py::arg("timeout") = py::none(),
           "Starts operations as one call, of which ranks that give others are refused all; a "
           "handle for each. `calls`: (kind, input, output, result, op, prescale, root, counts).")
      .def(
          "run_grouped",
          [](const std::shared_ptr<Group>& of, const std::string& kind, const Arrays& inputs,
             const Arrays& outputs, const std::string& op, double prescale, double postscale,
             int root, const py::object& name, const py::object& algorithm, const py::object& level,
             const py::object& timeout) {
            refuse_in_child();
            const BegunGrouped begun = begin_grouped(
                *of, kind, inputs, outputs,
                options_from(kind, op, prescale, postscale, root, name, algorithm, level, timeout),
                true);
            wait_for(of, begun.wait);
            if (begun.after_wait) begun.after_wait();
          },
          py::arg("kind"), py::arg("inputs"), py::arg("outputs"), py::arg("op") = "sum",
          py::arg("prescale") = 1.0, py::arg("postscale") = 1.0, py::arg("root") = 0,
          py::arg("name") = py::none(), py::arg("algorithm") = py::none(),
          py::arg("level") = py::none(), py::arg("timeout") = py::none())
      .def(
          "start_grouped",
          [](const std::shared_ptr<Group>& of, const std::string& kind, const Arrays& inputs,
             const Arrays& outputs, const py::object& result, const std::string& op,
             double prescale, double postscale, int root, const py::object& name,
             const py::object& algorithm, const py::object& level, const py::object& timeout) {
            refuse_in_child();
            BegunGrouped begun = begin_grouped(
                *of, kind, inputs, outputs,
                options_from(kind, op, prescale, postscale, root, name, algorithm, level, timeout),
                false);
            if (begun.is_captured) wait_for(of, begun.wait);
            return PyHandle(of, std::move(begun.wait), std::move(begun.done), result,
                            std::move(begun.after_wait));
          },
          py::arg("kind"), py::arg("inputs"), py::arg("outputs"), py::arg("result"),
          py::arg("op") = "sum", py::arg("prescale") = 1.0, py::arg("postscale") = 1.0,
          py::arg("root") = 0, py::arg("name") = py::none(), py::arg("algorithm") = py::none(),
          py::arg("level") = py::none(), py::arg("timeout") = py::none());
}

}  // namespace farandole
