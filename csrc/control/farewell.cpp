#include "control/farewell.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/clock.h"
#include "base/fixed_text.h"
#include "control/control_mesh.h"
#include "control/launcher.h"

namespace farandole {
namespace {

constexpr auto kLongestEnd = std::chrono::seconds(20);  // from the last word of Python to exit()

/// The rank that ends. Never freed: exit() may come after everything else has been destroyed.
struct Ending {
  std::shared_ptr<Segment> segment;
  std::shared_ptr<ControlMesh> mesh;  // null where all ranks are on this host
  int rank;
  int blamed;
  pid_t process;
};
Ending* ending = nullptr;

FarewellState state_of(const Farewell& farewell) {
  return static_cast<FarewellState>(farewell.state.load(std::memory_order_acquire));
}

void show(Farewell& farewell, FarewellState state) {
  farewell.state.store(static_cast<uint64_t>(state), std::memory_order_release);
}

void show_exit_code(int code, void*) {
  if (::getpid() != ending->process) return;  // a forked child, whose parent lives on
  Farewell& farewell = ending->segment->page(ending->rank).farewell;
  if (state_of(farewell) != FarewellState::ending) return;
  if (code != 0) {  // the launcher first: peers that hear of it may end sooner than this process
    char word[64];
    std::snprintf(word, sizeof word, "end%c%d%c%d%c", kBetweenParts, code, kBetweenParts,
                  ending->blamed, kBetweenParts);
    tell_launcher(word);
  }
  farewell.exit_code = code;
  show(farewell, code == 0 ? FarewellState::none : FarewellState::known);
  if (ending->mesh) ending->mesh->tell_last_state();
}

}  // namespace

void show_exception(const Segment& segment, int rank, std::string_view what,
                    std::string_view place) {
  Farewell& farewell = segment.page(rank).farewell;
  if (state_of(farewell) == FarewellState::known) return;  // the first cause stands
  copy_cut(what, farewell.what);
  copy_cut(place, farewell.place);
  show(farewell, FarewellState::known);
}

void show_exit_code_at_end(std::shared_ptr<Segment> segment, std::shared_ptr<ControlMesh> mesh,
                           int rank, int blamed) {
  Farewell& farewell = segment->page(rank).farewell;
  if (state_of(farewell) == FarewellState::known) return;
  const bool first = ending == nullptr;
  if (first) ending = new Ending;
  *ending = {std::move(segment), std::move(mesh), rank, blamed, ::getpid()};
  // Unlike other handlers of exit(), one of on_exit() is given the exit code.
  if (first && ::on_exit(show_exit_code, nullptr) != 0) return;
  farewell.since = now().time_since_epoch().count();
  show(farewell, FarewellState::ending);
}

bool has_said_why(const Segment& segment, int rank) {
  return state_of(segment.page(rank).farewell) == FarewellState::known;
}

bool is_ending(const Segment& segment, int rank) {
  const Farewell& farewell = segment.page(rank).farewell;
  if (state_of(farewell) != FarewellState::ending) return false;
  return now().time_since_epoch().count() - farewell.since < Duration(kLongestEnd).count();
}

std::optional<Error> farewell_of(const Segment& segment, int rank, Context where) {
  const Farewell& farewell = segment.page(rank).farewell;
  if (state_of(farewell) != FarewellState::known) return std::nullopt;
  const std::string name = "rank " + std::to_string(rank) + " ended with ";
  if (farewell.exit_code != 0) {
    where.evidence = "its program called exit() with this code";
    return Error(ErrorCode::remote_error, name + "exit code " + std::to_string(farewell.exit_code),
                 std::move(where));
  }
  where.evidence = text_in(farewell.place);
  return Error(ErrorCode::remote_error, name + text_in(farewell.what), std::move(where));
}

}  // namespace farandole
