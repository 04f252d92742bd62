// Worlds: how one begins and ends, and its settings.
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>

#include "backends/algorithm_names.h"
#include "backends/mesh.h"
#include "base/arm_fault.h"
#include "base/key_pair.h"
#include "base/libcrypto.h"
#include "base/log.h"
#include "bindings/bind.h"
#include "bindings/calls.h"
#include "bindings/named_handles.h"
#include "bindings/tracing.h"
#include "bindings/waiting.h"
#include "control/control_mesh.h"
#include "control/farewell.h"
#include "control/join.h"
#include "control/launcher.h"
#include "engine/fork.h"
#include "group/group.h"
#include "jax/handlers.h"
#include "stream/bytes_begun.h"
#include "stream/stream.h"
#include "transport/mpi_end.h"
#include "transport/mpi_port.h"
#include "transport/tcp_address.h"
#include "transport/tcp_handshake.h"

namespace farandole {
namespace {

LogLevel log_level_from(const std::string& name) {
  return name == "error"   ? LogLevel::error
         : name == "info"  ? LogLevel::info
         : name == "debug" ? LogLevel::debug
                           : LogLevel::warning;
}

/// At most a century: clocks count nanoseconds in 64 bits.
Duration to_duration(double seconds) {
  return std::chrono::duration_cast<Duration>(
      std::chrono::duration<double>(std::min(seconds, 3.2e9)));
}

EngineOptions engine_options(const Config& config) {
  EngineOptions options;
  options.spin = to_duration(config.spin_us * 1e-6);
  options.warn_after = to_duration(config.warn_after);
  options.progress = config.progress == "thread"   ? ProgressMode::thread
                     : config.progress == "caller" ? ProgressMode::caller
                                                   : ProgressMode::automatic;
  options.device_path = config.device_path;
  options.device_bucket_bytes = std::max<size_t>(config.device_bucket_bytes, 64 << 10);
  options.device_link_blocks = config.device_link_blocks;
  options.staged_piece_bytes = std::max<size_t>(config.staged_piece_bytes, 4 << 10);
  return options;
}

/// Where this rank cannot start one, the others, which have met it, are shown the reason.
std::shared_ptr<Engine> start_engine(Host host, EngineOptions options) {
  const auto segment = host.segment;
  const int rank = host.rank;
  try {
    auto engine = std::make_shared<Engine>(std::move(host), std::move(options));
    hide_from_children(engine);
    return engine;
  } catch (const Error& error) {
    show_exception(*segment, rank,
                   std::string(row(error.code()).python_class) + ": " + error.verdict(), "init()");
    segment->show_state(rank, RankState::gone);
    throw;
  }
}

/// Before the ranks meet: what this process is told is right.
void prepare_world(int rank, int size) {
  refuse_in_child();
  const Config config = Config::from_environment();
  set_log_rank(size > 1 ? rank : -1);
  set_log_level(log_level_from(config.log_level));
  if (!config.fault.empty()) arm_fault(config.fault, rank);
  if (rank == 0)
    for (const std::string& line : unread_variables()) log(LogLevel::warning, line);
  if (!config.algorithm.empty()) require_algorithm_name("FARANDOLE_ALGORITHM", config.algorithm);
  watch_for_forks();
}

/// The descriptors become ours.
std::shared_ptr<HostPeer> peer_of(int rank, const std::string& host, pid_t pid,
                                  const py::bytes& addresses, const std::vector<int>& cpus,
                                  int doorbell, int process) {
  auto peer = std::make_shared<HostPeer>();
  const auto bytes = std::as_bytes(std::span(std::string_view(addresses)));
  peer->info = {rank, host, pid, {bytes.begin(), bytes.end()}};
  for (const int cpu : cpus)
    if (cpu >= 0 && static_cast<size_t>(cpu) < peer->cpus.size())
      peer->cpus.set(static_cast<size_t>(cpu));
  peer->doorbell = Fd(doorbell);
  peer->process = Fd(process);
  peer->here = doorbell >= 0;
  return peer;
}

size_t arena_bytes(const Config& config, int ranks) {
  return config.arena_bytes > 0 ? config.arena_bytes : default_arena_bytes(ranks);
}

std::shared_ptr<Segment> make_host_memory(int ranks, const std::optional<py::bytes>& secret) {
  return Segment::create(ranks, arena_bytes(Config::from_environment(), ranks),
                         secret ? std::optional(secret_from(*secret)) : std::nullopt);
}

ForeignWish foreign_wish(const Config& config) {
  return config.cma == "0"   ? ForeignWish::never
         : config.cma == "1" ? ForeignWish::always
                             : ForeignWish::if_faster;
}

Wire wire_from(const Config& config) {
  return config.wire == "sealed"    ? Wire::sealed
         : config.wire == "checked" ? Wire::checked
                                    : Wire::plain;
}

Host enter(Roll roll, const Config& config, Deadline deadline, const py::object& look) {
  const auto interrupted = [&look] {
    look_for_signals();
    const py::gil_scoped_acquire locked;
    if (!look.is_none()) look();
  };
  Host host = roll.peers.empty()
                  ? host_alone(arena_bytes(config, 1))
                  : join(std::move(roll), foreign_wish(config), deadline, interrupted);
  host.segment->hide_from_children();
  log(LogLevel::info, "joined a world of " + std::to_string(host.size()) + " ranks, " +
                          std::to_string(host.ranks_here().size()) + " on this host; " +
                          std::to_string(host.segment->arena(host.rank).size() >> 20) +
                          " MiB of arena each");
  if (!host.foreign.preferred)
    log(config.cma == "1" ? LogLevel::warning : LogLevel::info,
        "data are copied through shared memory: " + host.foreign.why_not);
  return host;
}

Duration most_silence(const Config& config) {
  const double seconds = config.link_timeout;
  return seconds == 0 ? Duration::max() : duration_of(seconds);
}

std::shared_ptr<Group> open_world(int rank, const std::vector<std::shared_ptr<HostPeer>>& peers,
                                  const std::shared_ptr<Segment>& memory, const std::string& job,
                                  const std::optional<double>& start_timeout,
                                  const std::string& tuning,
                                  const std::optional<std::vector<int>>& listeners,
                                  const std::shared_ptr<MpiPort>& mpi, const py::object& look) {
  refuse_in_child();
  const Config config = Config::from_environment();
  const Wire wire = wire_from(config);
  Roll roll{.rank = rank,
            .memory = memory,
            .on_several_hosts = listeners.has_value(),
            .mesh = {.hides = wire == Wire::sealed, .most_silence = most_silence(config)}};
  for (const auto& peer : peers) roll.peers.push_back(std::move(*peer));
  if (listeners)
    for (const int listener : *listeners) roll.listeners.emplace_back(listener);
  const Deadline deadline = Deadline::after_seconds(start_timeout.value_or(config.start_timeout));
  Host host = enter(std::move(roll), config, deadline, look);
  EngineOptions options = engine_options(config);
  const TuningTable table = tuning.empty() ? TuningTable{} : table_from(tuning);
  lay_mesh(options, table, config.transport, mpi, wire);
  log(LogLevel::info,
      "choices follow from tuning table " + fingerprint(table) + " (" + table.origin + ")");
  options.trace = start_trace(config.trace, host, job, fingerprint(table));
  const char* const run = std::getenv("FARANDOLE_RUN_ID");
  options.job = run != nullptr ? run : job;
  const auto engine = start_engine(std::move(host), std::move(options));
  GroupDefaults defaults;
  defaults.interrupted = look_for_signals;
  defaults.timeout = to_duration(config.timeout);
  defaults.level = level_from(config.level);
  defaults.algorithm = config.algorithm;
  if (mpi)
    mpi->when_finalized([weak = std::weak_ptr(engine)] {
      if (const auto alive = weak.lock())
        alive->show_end("MPI_Finalize, while ranks communicated",
                        "call farandole.shutdown() before MPI.Finalize()");
    });
  return Group::world(engine, defaults, deadline);
}

/// The group's failure, which keeps some rank from coming to MPI_Finalize.
std::optional<Error> failure_of(const Group& group) {
  try {
    group.check();
  } catch (const Error& verdict) {
    return verdict;
  }
  return std::nullopt;
}

void leave(Group& group) {
  {
    const py::gil_scoped_release unlocked;
    group.engine()->leave();
    group.engine()->driver().stop();
    group.engine()->end_tasks();
    std::optional<Error> failure = group.engine()->leave_transports();
    if (!failure) failure = failure_of(group);
    if (failure) abandon_mpi(failure->verdict(), failure->where().rank != world_rank(group));
  }
  if (const auto channel = jax_channel(); channel && channel->world().get() == &group)
    set_jax_channel(nullptr);
  finish_trace(group.engine()->trace());
}

void show_why(Group& group, const py::object& what, const py::object& place) {
  refuse_in_child();
  const Host& host = group.engine()->host();
  show_exception(*host.segment, world_rank(group), text_from(what, "what"),
                 text_from(place, "place"));
  if (host.mesh) host.mesh->tell_state();
}

void report_exception(Group& group, const py::object& what, const py::object& place) {
  show_why(group, what, place);
  Context where;
  where.rank = world_rank(group);
  where.pid = ::getpid();
  if (const auto error = farewell_of(*group.engine()->host().segment, where.rank, where))
    group.abort(*error);
}

void show_code_at_end(Group& group, int blamed) {
  refuse_in_child();
  const Host& host = group.engine()->host();
  show_exit_code_at_end(host.segment, host.mesh, world_rank(group), blamed);
}

py::list settings_here() {
  py::list list;
  for (const Setting& s : settings(Config::from_environment())) {
    py::dict row;
    row["name"] = s.name;
    row["type"] = s.type;
    row["value"] = s.value;
    row["default"] = s.fallback;
    row["doc"] = s.doc;
    row["horovod"] = s.horovod;
    list.append(row);
  }
  return list;
}

py::bytes bytes_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

Key secret_from(const py::bytes& secret) {
  const std::string_view bytes(secret);
  Key key{};
  if (bytes.size() != key.size())
    throw Error(ErrorCode::invalid_argument,
                "a job's secret has 32 bytes, not " + std::to_string(bytes.size()));
  std::ranges::copy(std::as_bytes(std::span(bytes)), key.begin());
  return key;
}

void bind_world(py::module_& module) {
  module.def("prepare_world", &prepare_world, py::arg("rank"), py::arg("size"),
             "Before the ranks meet: reads the settings, warns of what nobody reads, and raises "
             "where one is wrong.");
  module.def(
      "open_world", &open_world, py::arg("rank"), py::arg("peers"), py::arg("memory"),
      py::arg("job"), py::arg("start_timeout") = py::none(), py::arg("tuning") = "",
      py::arg("listeners") = py::none(), py::arg("mpi") = py::none(), py::arg("look") = py::none(),
      py::call_guard<py::gil_scoped_release>(),
      "The group of all ranks that have met. `peers`: of each, by rank, and used up; none: a world "
      "of one. `memory`: of this host. `tuning`: a table as text (tuning.text), the same on all; "
      "the defaults if empty. `listeners`: where ranks are on several hosts, the descriptors of "
      "this rank's listening sockets, which are closed with the world. `mpi`: what data may go "
      "over between them. `look`: called ten times a second meanwhile; it may raise.");
  py::class_<Segment, std::shared_ptr<Segment>>(module, "HostMemory",
                                                "The memory that all ranks of a host map.")
      .def_static("make", &make_host_memory, py::arg("ranks"), py::arg("secret") = py::none(),
                  "For all ranks of the job, one arena of FARANDOLE_ARENA_BYTES for each. "
                  "`secret`: 32 bytes, the job's; made here if there is none.")
      .def_static(
          "of", [](int descriptor) { return Segment::attach(Fd(descriptor)); },
          py::arg("descriptor"), "That another rank of this host has made; closed with it.")
      .def("fileno", &Segment::fd);
  py::class_<HostPeer, std::shared_ptr<HostPeer>>(module, "Peer", "A rank, as the others know it.")
      .def(py::init(&peer_of), py::arg("rank"), py::arg("host"), py::arg("pid"),
           py::arg("addresses") = py::bytes(), py::arg("cpus") = std::vector<int>{},
           py::arg("doorbell") = -1, py::arg("process") = -1,
           "`addresses`: where it listens, one after the other, the best ones first. Of one on "
           "this host: the processors it may run on, and the descriptors that wake it and are "
           "readable once it has died.");
  module.def(
      "make_doorbell", [] { return make_event_fd().release(); },
      "A descriptor that wakes this rank.");
  module.def(
      "own_process", [] { return own_process().release(); },
      "A descriptor of this process, readable for others once it has died.");
  module.def(
      "look_for_libcrypto_in",
      [](const py::object& module_file) {
        look_for_libcrypto_in(text_from(module_file, "module"));
      },
      py::arg("module"),
      "Before ranks meet: the file of a module that is loaded and linked to OpenSSL's libcrypto; "
      "the program itself if empty.");
  py::class_<KeyPair>(module, "KeyPair", "For a secret of ranks that were given none.")
      .def(py::init<>())
      .def("public_key", [](const KeyPair& own) { return bytes_of(own.public_key()); })
      .def(
          "shared_with",
          [](const KeyPair& own, const py::bytes& other) {
            return bytes_of(own.shared_with(std::as_bytes(std::span(std::string_view(other)))));
          },
          py::arg("other"), "A key that both have, from the other's public key.");
  module.def(
      "errno_error",
      [](int number, const py::object& call) {
        errno = number;
        return python_error(errno_error(text_from(call, "call")));
      },
      py::arg("number"), py::arg("call"), "What the kernel refused this process, as an error.");
  module.def(
      "tcp_address", [](int socket) { return bytes_of(TcpAddress::of_listener(socket).bytes()); },
      py::arg("socket"), "Where a listening socket is reached, as OtherHosts takes it.");
  module.def(
      "wire_format", &wire_format,
      "(what, as this build has it) of each: ranks on several hosts must have them in common.");
  module.def(
      "agreed_settings", [] { return agreed_settings(Config::from_environment()); },
      "Those that must be the same on all ranks, as text.");
  module.def(
      "tell_launcher", [](const py::object& word) { tell_launcher(text_from(word, "word")); },
      py::arg("word"), "A word to `farandole run`, in parts with \\x1f between.");
  module.def("in_child", &in_child, "Whether this process was forked from a rank.");
  module.def(
      "reductions_begun", [] { return reductions_begun.load(std::memory_order_relaxed); },
      "How many operations that fold have begun in this process, of whichever group.");
  module.def("bytes_begun_by_hand", &bytes_begun_by_hand,
             "Bytes of operations in this process that were not steps of reducers.");
  module.def("settings", &settings_here);
  module.def("unread_variables", &unread_variables,
             "A sentence for each FARANDOLE_* variable that nobody reads.");
  py::class_<Group, std::shared_ptr<Group>> group = module.attr("Group");
  group
      .def("report_exception", &report_exception, py::arg("what"), py::arg("place"),
           "Fails the group: this rank ends with an exception that nobody caught.")
      .def("show_exception", &show_why, py::arg("what"), py::arg("place"),
           "Before leave(): it is because of this that the rank leaves.")
      .def("show_exit_code_at_end", &show_code_at_end, py::arg("blamed"),
           "Before leave(): this process ends; exit() will show its code to who waits, and to the "
           "launcher, together with the process that caused it (0: this one).")
      .def(
          "secret", [](const Group& g) { return bytes_of(g.engine()->host().segment->secret()); },
          "The job's, of 32 bytes.")
      .def("leave", [](Group& g) {
        refuse_in_child();
        std::exception_ptr interruption;
        try {
          leave_names(g);
        } catch (const py::error_already_set&) {
          interruption = std::current_exception();
        }
        leave(g);
        if (interruption) std::rethrow_exception(interruption);
      });
}

}  // namespace farandole
