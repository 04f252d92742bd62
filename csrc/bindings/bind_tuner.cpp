// Tuning tables as text and numbers, and the choices that follow from them.
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "backends/explain.h"
#include "backends/schedule_backend.h"
#include "bindings/bind.h"
#include "bindings/schedules.h"
#include "devices/device_paths.h"
#include "devices/step_plan.h"
#include "schedule/cut.h"

namespace farandole {
namespace {

DType dtype_of(const std::string& name) {
  if (const auto dtype = dtype_named(name)) return *dtype;
  throw Error(ErrorCode::invalid_argument, "there is no dtype '" + name + "'");
}

TuningTable table_or_defaults(const std::string& text) {
  return text.empty() ? TuningTable{} : table_from(text);
}

std::string text_from_numbers(const std::map<std::string, double>& seconds,
                              const std::string& origin) {
  TuningTable table;
  table.measured = true;
  table.origin = origin;
  const std::vector<TuningField> fields = tuning_fields(table);
  for (const TuningField& f : fields) {
    const auto found = seconds.find(f.name);
    if (found == seconds.end())
      throw Error(ErrorCode::invalid_argument, "tuning table: no " + f.name);
    *f.value = found->second;
  }
  if (seconds.size() != fields.size())
    throw Error(ErrorCode::invalid_argument, "tuning table: it has " +
                                                 std::to_string(seconds.size()) + " numbers, not " +
                                                 std::to_string(fields.size()));
  return text_of(table);
}

py::dict numbers_of(const std::string& text) {
  TuningTable table = table_or_defaults(text);
  py::dict numbers;
  for (const TuningField& f : tuning_fields(table)) numbers[py::str(f.name)] = *f.value;
  return numbers;
}

/// A dict for each row of the table of paths.
py::list paths() {
  py::list rows;
  for (const PathRow* path : path_table()) {
    py::dict d;
    py::list collectives;
    for (const std::string_view name : kCollectiveNames)
      if (fits(*path, *collective_named(name), 0)) collectives.append(name);
    d["name"] = path->name;
    d["collectives"] = std::move(collectives);
    d["most_bytes"] =
        path->most_bytes == kUnlimited ? py::object(py::none()) : py::cast(path->most_bytes);
    d["mapped"] = path->mapped;
    d["by_address"] = path->by_address;
    rows.append(std::move(d));
  }
  return rows;
}

py::list explained(const std::string& collective, size_t count, const std::string& dtype, int ranks,
                   bool shared, bool foreign, bool demanded, const std::string& level,
                   const std::string& text, const std::string& transport) {
  const Question question{
      collective_of(collective), count,    dtype_of(dtype), ranks, shared, foreign, demanded,
      level_of(level),           transport};
  py::list rows;
  for (const Candidate& c : explain(question, table_or_defaults(text))) {
    py::dict d;
    d["backend"] = c.backend;
    d["name"] = c.name;
    d["seconds"] = c.seconds;
    d["refusal"] = c.refusal;
    d["chosen"] = c.chosen;
    rows.append(std::move(d));
  }
  return rows;
}

py::list explained_on_devices(const std::string& collective, size_t bytes, int ranks,
                              size_t spin_bytes, const std::string& setting,
                              const std::string& dtype, const std::string& level,
                              const std::string& no_nccl, bool switched, int lanes,
                              size_t piece_bytes, size_t staged_piece_bytes, bool take_turns) {
  const CollectiveSpec spec{.kind = collective_of(collective)};
  const bool has_shares = !is_cut_by_elements(spec.kind) && spec.kind != Collective::reduce_scatter;
  const size_t count = bytes / size_of(dtype_of(dtype));
  const Shape shape{.size = ranks,
                    .count = has_shares ? count / static_cast<size_t>(ranks) : count};
  DeviceQuestion question =
      question_of(spec, dtype_of(dtype), level_of(level), shape, device_asked("", setting));
  question.bytes = bytes;
  question.no_nccl = no_nccl;
  question.switched = switched;
  question.spin_bytes = spin_bytes;
  if (piece_bytes > 0)
    question.lanes = {.lanes = static_cast<uint32_t>(lanes), .piece_bytes = piece_bytes};
  question.staged_piece = staged_piece_bytes;
  question.take_turns = take_turns;
  py::list rows;
  for (const DeviceCandidate& c : explain_devices(question)) {
    py::dict d;
    d["name"] = c.name;
    d["seconds"] = c.seconds;
    d["words"] = c.words;
    d["refusal"] = c.refusal;
    d["chosen"] = c.chosen;
    rows.append(std::move(d));
  }
  return rows;
}

double traffic_of(const std::string& path, const std::string& collective, int ranks) {
  const PathRow* row = path_named(path);
  if (row == nullptr) throw Error(ErrorCode::invalid_argument, "there is no path '" + path + "'");
  return row->traffic(collective_of(collective), ranks);
}

}  // namespace

void bind_tuner(py::module_& module) {
  py::module_ tuning = module.def_submodule("tuning", "Tuning tables and what follows from them.");
  tuning.def(
      "fields",
      [] {
        py::list rows;
        TuningTable table;
        for (const TuningField& f : tuning_fields(table))
          rows.append(py::make_tuple(f.name, f.doc));
        return rows;
      },
      "(name, what it measures) of every number of a table; all are seconds.");
  tuning.def("text", text_from_numbers, py::arg("seconds"), py::arg("origin"),
             "The table as text, as `open_world` takes it; raises for numbers not to be believed.");
  tuning.def("numbers", numbers_of, py::arg("text") = "",
             "The numbers of a table; of none, the defaults.");
  tuning.def(
      "origin", [](const std::string& text) { return table_or_defaults(text).origin; },
      py::arg("text") = "", "Where the numbers come from.");
  tuning.def(
      "fingerprint", [](const std::string& text) { return fingerprint(table_or_defaults(text)); },
      py::arg("text") = "", "Equal for tables of equal numbers.");
  tuning.def(
      "explain", explained, py::arg("collective"), py::arg("count"), py::arg("dtype") = "float32",
      py::arg("ranks") = 2, py::arg("shared") = false, py::arg("foreign") = false,
      py::arg("demanded") = false, py::arg("level") = "canonical", py::arg("text") = "",
      py::arg("transport") = "auto",
      "Every path and planner as a dict: backend, name, predicted seconds, refusal, chosen.");
  tuning.def(
      "explain_devices", explained_on_devices, py::arg("collective"), py::arg("bytes"),
      py::arg("ranks") = 2, py::arg("spin_bytes") = 0, py::arg("setting") = "auto",
      py::arg("dtype") = "float32", py::arg("level") = "canonical", py::arg("no_nccl") = "",
      py::arg("switched") = false, py::arg("lanes") = 0, py::arg("piece_bytes") = 0,
      py::arg("staged_piece_bytes") = 0, py::arg("take_turns") = false,
      "Every way of a collective on arrays of devices as a dict: name, predicted seconds, words, "
      "refusal, chosen. spin_bytes: that kernels which run at once can take; no_nccl: why there is "
      "no NCCL; switched: a switch folds for it; lanes, piece_bytes: of schedules that kernels "
      "which run at once can take; staged_piece_bytes: of those in which long arrays go by the "
      "host, 0: as a whole; take_turns: ranks on a device, by slices of its time.");
  tuning.def(
      "is_measured", [](const std::string& text) { return table_or_defaults(text).measured; },
      py::arg("text") = "", "Whether paths are chosen by these numbers.");
  tuning.def("paths", paths,
             "The paths over shared memory, preferred ones first: name, collectives, most_bytes of "
             "the longest input (None: any), whether they need mapped memory or go by address.");
  tuning.def("traffic", traffic_of, py::arg("path"), py::arg("collective"), py::arg("ranks"),
             "How often a path reads or copies as many bytes as a rank's input has.");
  tuning.def(
      "split",
      [](size_t bytes) {
        const Split split = default_split(bytes);
        return py::make_tuple(split.lanes, split.segments);
      },
      py::arg("bytes"), "(lanes, segments) of schedules for data of that length.");
}

}  // namespace farandole
