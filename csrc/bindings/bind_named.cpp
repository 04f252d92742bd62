// Operations by name.
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "base/config.h"
#include "bindings/arrays.h"
#include "bindings/bind.h"
#include "bindings/calls.h"
#include "bindings/device_arrays.h"
#include "bindings/named_handles.h"
#include "engine/fork.h"
#include "fusion/joined_rank_proxy.h"
#include "fusion/sharded_update.h"

namespace farandole {
namespace {

/// (input or None, output or None, shape of the input)
using GivenTensor = std::tuple<py::object, py::object, std::vector<int64_t>>;

int64_t hold(HeldRequest held, const py::object& result, const py::object& finish) {
  held.result = result;
  if (!finish.is_none()) held.finish = finish;
  return NamedHandles::all().add(std::move(held));
}

int64_t submit_on_device(const std::shared_ptr<PyNames>& names, const NamedCall& call,
                         const std::vector<GivenTensor>& given, const py::object& result,
                         const py::object& finish) {
  std::vector<py::object> inputs;
  std::vector<std::vector<int64_t>> shapes;
  HeldRequest held;
  for (const auto& [input, output, shape] : given) {
    inputs.push_back(input);
    held.outputs.push_back(output);
    shapes.push_back(shape);
  }
  held.names = names;
  held.staged =
      submit_staged_named(*names->world, *names->named, call, inputs, held.outputs, shapes);
  held.request = held.staged->request();
  return hold(std::move(held), result, finish);
}

int64_t submit(const std::shared_ptr<PyNames>& names, const std::string& kind,
               const py::object& name, const std::vector<GivenTensor>& given, uint32_t set,
               const std::string& op, double prescale, double postscale, int root,
               const std::vector<int64_t>& splits, const py::object& result,
               const py::object& finish) {
  refuse_in_child();
  NamedCall call;
  static_cast<CollectiveSpec&>(call) = options_from(kind, op, prescale, postscale, root, py::none(),
                                                    py::none(), py::none(), py::none());
  call.set = set;
  call.splits = splits;
  const std::string text = name.is_none() ? std::string() : text_from(name, "name");
  call.name = text;
  const auto on_device = [](const GivenTensor& tensor) {
    return is_on_device(std::get<0>(tensor)) || is_on_device(std::get<1>(tensor));
  };
  if (std::ranges::any_of(given, on_device))
    return submit_on_device(names, call, given, result, finish);
  std::vector<NamedTensor> tensors;
  py::list keep;
  for (const auto& [input, output, shape] : given) {
    const Borrowed in = borrow(input, input.is(output), "tensor");
    NamedTensor tensor{{in.buffer, {nullptr, 0, in.buffer.dtype}}, shape};
    keep.append(in.owner);
    if (input.is(output)) {
      tensor.output = in.buffer;
    } else if (!output.is_none()) {
      const Borrowed out = borrow(output, true, "result");
      tensor.output = out.buffer;
      keep.append(out.owner);
    }
    tensors.push_back(tensor);
  }
  call.tensors = tensors;
  HeldRequest held;
  held.names = names;
  held.request = names->named->submit(call);
  held.keep = std::move(keep);
  return hold(std::move(held), result, finish);
}

int64_t join(const std::shared_ptr<PyNames>& names) {
  refuse_in_child();
  HeldRequest held;
  held.names = names;
  held.request = names->named->join();
  held.finish = py::cpp_function([](const py::object&, const py::object& last) { return last; });
  return NamedHandles::all().add(std::move(held));
}

std::vector<int> serve_as_proxy(const std::shared_ptr<PyNames>& names, int64_t handle,
                                std::vector<std::shared_ptr<Reducer>> reducers,
                                const std::vector<std::shared_ptr<ShardedUpdate>>& updates) {
  refuse_in_child();
  std::vector<std::shared_ptr<Stream>> others;
  for (const auto& update : updates) others.push_back(update->stream());
  const NamedRequest* const join = NamedHandles::all().find(handle).request;
  JoinedRankProxy here(*names->world, join->finished, std::move(reducers), std::move(others));
  wait_for(names->world, [&](Deadline d) { return here.wait(d); });
  return here.steps();
}

std::shared_ptr<PyNames> names_of(const std::shared_ptr<Group>& world) {
  refuse_in_child();
  std::shared_ptr<PyNames>& current = current_names();
  if (current && current->world == world) return current;
  const Config config = Config::from_environment();
  auto named = Named::open(*world, {config.fusion_bytes, config.name_cache});
  current = std::make_shared<PyNames>(PyNames{world, std::move(named)});
  set_names_for_plugins(current);
  return current;
}

}  // namespace

void bind_named(py::module_& module) {
  py::class_<PyNames, std::shared_ptr<PyNames>>(module, "Names",
                                                "The operations by name of a world.")
      .def("submit", &submit, py::arg("kind"), py::arg("name"), py::arg("tensors"),
           py::arg("set") = 0, py::arg("op") = "sum", py::arg("prescale") = 1.0,
           py::arg("postscale") = 1.0, py::arg("root") = 0,
           py::arg("splits") = std::vector<int64_t>{}, py::arg("result") = py::none(),
           py::arg("finish") = py::none(),
           "Puts an operation on its way and returns its handle. Tensors are (input, output, shape "
           "of the input); without an output the core makes one and hands it to "
           "`finish(made, received)`, whose answer is then the result.")
      .def("join", &join,
           "Takes part in the others' operations until all have joined; the "
           "handle's result is the last rank to join.")
      .def(
          "serve_as_proxy", &serve_as_proxy, py::arg("handle"), py::arg("reducers"),
          py::arg("updates"),
          "Until that join is over, takes part in the reducers' steps with zeros. A step of one of "
          "the updates fails the world. Returns how many steps it were, by reducer.")
      .def(
          "add_set",
          [](const PyNames& names, const std::shared_ptr<Group>& group, std::vector<int> members) {
            refuse_in_child();
            return names.named->add_set(group.get(), std::move(members));
          },
          py::arg("group").none(true), py::arg("ranks"),
          "Registers a process set; collective, followed by a barrier of the world.")
      .def(
          "remove_set",
          [](const PyNames& names, uint32_t set) {
            refuse_in_child();
            names.named->remove_set(set);
          },
          py::arg("set"))
      .def("describe", [](const PyNames& names) { return names.named->describe(); });
  py::class_<StagedResult>(module, "StagedResult", "A result on its way to a device.")
      .def(
          "deliver",
          [](const StagedResult& r, const py::object& array) {
            refuse_in_child();
            deliver(*r.names->world, *r.staged, r.tensor, array);
          },
          py::arg("array"),
          "Once: into an array of its dtype and shape on that device, which has just been made.");
  module.def("names_of", &names_of, py::arg("world"), "The operations by name of this world.");
  module.def(
      "wait_by_number", [](int64_t handle) { return NamedHandles::all().wait(handle); },
      py::arg("handle"), "Waits for the operation and returns its result; the handle is spent.");
  module.def(
      "done_by_number",
      [](int64_t handle) {
        refuse_in_child();
        const HeldRequest& held = NamedHandles::all().find(handle);
        if (held.names->named->done(*held.request)) return true;
        const std::shared_ptr<PyNames> names = held.names;
        const py::gil_scoped_release unlocked;
        names->world->engine()->driver().turn(std::chrono::microseconds(50));
        return false;
      },
      py::arg("handle"), "Whether wait_by_number would return at once; drives a little.");
  module.def(
      "quick_submit",
      [](const py::object& bump_version) {
        return py::cpp_function([bump_version](const py::object& slow) {
          return make_quick_submit(slow, bump_version);
        });
      },
      py::arg("bump_version"),
      "Decorates allreduce_async_ with a quick way past it for named tensors; `bump_version` is "
      "called with a tensor that will change.");
  module.def("quick_wait", &make_quick_wait, py::arg("slow"), "Decorates synchronize likewise.");
}

}  // namespace farandole
